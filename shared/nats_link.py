"""One NATS connection that comes back: bounded connect at start, endless reconnects after it, explicit queue bounds.

Used by the bus only. nats-py reports dropped messages (slow consumers) nowhere but in its error callback, and gives up for
good on some server errors: both are handled here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from triptych.shared.errors import BadRequest, Overloaded

CONNECT_TIMEOUT_S = 20.0  # chosen: a NATS server starts in well under a second, a container in a few
DIAL_TIMEOUT_S = 2  # chosen: one try; nats-py takes whole seconds
RECONNECT_WAIT_S = 0.2  # chosen: plus as much jitter again and a half
CLOSE_TIMEOUT_S = 3.0  # chosen: the last publishes are on their way within a round trip
PING_INTERVAL_S = 10  # chosen: a server that hangs without closing is left after two of them; nats-py's default is 2 minutes
PENDING_MESSAGES = 65_536  # chosen: per subscription; more are dropped and counted
PENDING_BYTES = 64 << 20  # chosen: per subscription
OUTBOUND_BYTES = 4 << 20  # chosen: what is kept for the server while the connection is broken

MessageCallback = Callable[[Msg], Awaitable[None]]

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class BusCounters:
    """What went wrong on one connection since the process began; read by the metrics."""

    num_slow_consumer_drops: int = 0
    num_errors: int = 0
    num_disconnects: int = 0
    num_invalid_payloads: int = 0
    num_refused_requests: int = 0
    num_handler_errors: int = 0
    num_dropped_publishes: int = 0


class NatsLink:
    """A NATS client whose subscriptions survive everything but close()."""

    def __init__(self, url: str, name: str) -> None:
        self.counters = BusCounters()
        self._url = url
        self._name = name
        self._client = Client()
        self._callbacks: dict[str, MessageCallback] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._reconnected_callbacks: list[Callable[[], None]] = []
        self._last_error = ""
        self._is_up = False  # connected once, and not closed by us
        self._reopening: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, url: str, name: str) -> NatsLink:
        """Raises Overloaded when no server answers at url within CONNECT_TIMEOUT_S, BadRequest when url is none."""
        link = cls(url, name)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await link._open()
        except nats.errors.Error as error:
            raise BadRequest(f"TRIPTYCH_NATS_URL is not a NATS server's URL ({error})", code="bad_setting") from None
        except TimeoutError:
            await link._client.close()
            place = (urlsplit(url).netloc or url).rpartition("@")[2]
            detail = f" ({link._last_error})" if link._last_error else ""
            raise Overloaded(
                f"no NATS server answers at {place} within {CONNECT_TIMEOUT_S:.0f} s{detail}; is TRIPTYCH_NATS_URL right?",
                code="bus_unavailable",
            ) from None
        link._is_up = True
        return link

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        self._reconnected_callbacks.append(callback)

    async def subscribe(self, subject: str, callback: MessageCallback) -> None:
        """callback runs for one message after the other. The server knows of it when this returns. Once per subject."""
        self._callbacks[subject] = callback
        if self._is_reopening:
            return  # it subscribes to all that is in _callbacks
        try:
            await self._subscribe(subject, callback)
            await self._flush()
        except nats.errors.Error:
            _log.debug("subscribed while disconnected", subject=subject)  # replayed by the reconnect

    @property
    def _is_reopening(self) -> bool:
        return self._reopening is not None and not self._reopening.done()

    async def _subscribe(self, subject: str, callback: MessageCallback) -> None:
        self._subscriptions[subject] = await self._client.subscribe(
            subject, cb=callback, pending_msgs_limit=PENDING_MESSAGES, pending_bytes_limit=PENDING_BYTES
        )

    async def _flush(self) -> None:
        """nats-py's flush sends its PING past commands that still wait in its buffer; by the second they have gone out."""
        for _ in range(2):
            await self._client.flush(timeout=DIAL_TIMEOUT_S)

    async def unsubscribe(self, subject: str) -> None:
        """Returns when the server sends nothing more there and the callback has had what it did send."""
        self._callbacks.pop(subject, None)
        subscription = self._subscriptions.pop(subject, None)
        if subscription is not None and self._client.is_connected:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._flush()
                    await subscription.drain()  # type: ignore[no-untyped-call]
            except (nats.errors.Error, TimeoutError) as error:
                _log.debug("unsubscribed unclean", subject=subject, error=type(error).__name__)

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Raises nats.errors.Error when closed, or broken with a full buffer."""
        await self._client.publish(subject, payload, reply=reply)

    async def close(self) -> None:
        """Sends what was published, then disconnects. Idempotent."""
        self._is_up = False
        if self._reopening is not None:
            self._reopening.cancel()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if self._client.is_connected:
                    await self._flush()
                await self._client.close()
        except (nats.errors.Error, TimeoutError) as error:
            _log.debug("bus closed unclean", error=type(error).__name__)

    async def _open(self) -> None:
        await self._client.connect(
            self._url,
            name=self._name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            # nats-py annotates whole seconds but only compares and sleeps
            reconnect_time_wait=RECONNECT_WAIT_S * (1 + 1.5 * random.random()),  # type: ignore[arg-type]
            connect_timeout=DIAL_TIMEOUT_S,
            ping_interval=PING_INTERVAL_S,
            pending_size=OUTBOUND_BYTES,
        )

    async def _reopen(self) -> None:
        """nats-py closed for good (the server sent -ERR): start again with a new client and the old subscriptions."""
        while self._is_up:
            self._client, self._subscriptions = Client(), {}
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self._open()
                while missing := self._callbacks.keys() - self._subscriptions.keys():  # others may come meanwhile
                    for subject in missing:
                        if subject in self._callbacks:
                            await self._subscribe(subject, self._callbacks[subject])
            except (TimeoutError, OSError, nats.errors.Error) as error:
                _log.warning("bus still unreachable", error=type(error).__name__)
                await self._client.close()
                await asyncio.sleep(RECONNECT_WAIT_S)
                continue
            await self._on_reconnected()
            return

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters.num_slow_consumer_drops += 1
            _log.warning("bus message dropped: this process is too slow", subject=error.subject)
        else:
            self.counters.num_errors += 1
            _log.debug("bus error", error=self._last_error)

    async def _on_disconnected(self) -> None:
        if self._is_up:
            self.counters.num_disconnects += 1
            _log.warning("bus connection lost, reconnecting")

    async def _on_reconnected(self) -> None:
        _log.info("bus connection is back")
        for callback in self._reconnected_callbacks:
            callback()

    async def _on_closed(self) -> None:
        if self._is_up and not self._is_reopening:
            self._reopening = asyncio.create_task(self._reopen(), name="bus reopen")
