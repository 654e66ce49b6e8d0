"""One HTTP connection of a client that may be hostile or gone: it is cut when it sends no whole request head, or reads nothing.

uvicorn has a bound for neither. Without them such a client holds its connection, and what was written for it, for ever.
What is written in one turn of the event loop goes out together: uvloop would make a system call of each piece.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 30.0  # chosen: from the connection, or the head's first byte, to the head's end
UNREAD_TIMEOUT_S = 60.0  # chosen: how long a client may read nothing at all of what waits for it
CHECK_INTERVAL_S = 5.0  # chosen: the timeouts above are that exact
MAX_HELD_BYTES = 1 << 16  # chosen: more goes out at once, so that the transport can say when it has enough


class TurnWriter:
    """A transport that sends at the end of the turn: a head with its body, the last event of a stream with the end."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._num_held_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(data)
        self._num_held_bytes += len(data)
        if self._num_held_bytes > MAX_HELD_BYTES:
            self._send()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        held, self._held, self._num_held_bytes = self._held, [], 0
        if held and not self._transport.is_closing():
            self._transport.writelines(held)


class Connection(H11Protocol):
    """h11: of uvicorn's protocols the one whose bound on headers can be set. Looks after itself from connection_made to
    connection_lost. Answers that are not ready yet have no bound here."""

    _check: asyncio.TimerHandle | None = None
    _head_until_s = 0.0
    _unread_until_s = 0.0
    _num_unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(TurnWriter(transport, self.loop))  # type: ignore[arg-type]
        self._head_until_s = self.loop.time() + HEAD_TIMEOUT_S
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        self._check = self.loop.call_later(CHECK_INTERVAL_S, self._look)

    def _look(self) -> None:
        now_s = self.loop.time()
        if not self._awaits_head:
            self._head_until_s = now_s + HEAD_TIMEOUT_S
        num_unread_bytes = self.transport.get_write_buffer_size() + self._num_kernel_bytes()
        if num_unread_bytes == 0 or num_unread_bytes != self._num_unread_bytes:
            self._num_unread_bytes = num_unread_bytes
            self._unread_until_s = now_s + UNREAD_TIMEOUT_S
        if now_s >= min(self._head_until_s, self._unread_until_s):
            self.transport.abort()  # close() would wait for the client to read the rest
        else:
            self._look_again()

    def _num_kernel_bytes(self) -> int:
        """Not yet taken by the client's machine. Of megabytes, some may leave long before our own buffer gets shorter."""
        try:
            outstanding = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            return 0
        return int(struct.unpack("i", outstanding)[0])

    @property
    def _awaits_head(self) -> bool:
        """Neither is a request being answered, nor does uvicorn's timer for idle connections run, nor is this the end."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return not (is_answering or self.timeout_keep_alive_task is not None or self.transport.is_closing())
