"""Token chunks on their way to the routers: those of one step go out as one TokenBatch per router, while the next step
already runs. Steps that follow each other faster than anybody reads share a batch: a message and an event to the client cost
the router as much for one token as for ten. A slow bus makes the decode loop wait (has_room) rather than the outbox grow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator

import msgspec
import structlog

from triptych.shared.messages import Event, InstanceId, RequestId, TokenBatch, TokenChunk, stream_subject
from triptych.shared.wire import MAX_PAYLOAD_BYTES

MAX_WAITING_CHUNKS = 16_384  # chosen: some 2 MB, hundreds of steps
MAX_JOINED_TOKENS = 128  # chosen: with 20 log probabilities each they take 46 KB, and a chunk has to fit in a batch
FLUSH_S, FLUSH_POLL_S = 1.0, 0.005  # chosen: a bus that is there takes milliseconds
BATCH_BYTES = MAX_PAYLOAD_BYTES - 1024  # room for the batch's own fields
CHUNK_BYTES = 64  # measured: MessagePack of a chunk without its strings and tokens is under this
TIME_BYTES = 128  # measured: the same for StageTime, and for WireError
TOKEN_BYTES = 5  # MessagePack of a uint32
KV_BYTES = 512  # measured: the same for KvRef
LOGPROB_BYTES = 16  # MessagePack of a float64, a uint32 and the array around them

_log = structlog.get_logger(__name__)


class Outbox:
    """Owns the sending task.

    Args:
        instance_id: sender in the batches.
        publish: Bus.publish_event.
        interval_s: least time between two batches to a router, unless an output ends.
    """

    def __init__(
        self, instance_id: InstanceId, publish: Callable[[str, Event], Awaitable[None]], interval_s: float = 0.0
    ) -> None:
        self._instance_id = instance_id
        self._publish = publish
        self._interval_s = interval_s
        self._waiting: dict[InstanceId, list[TokenChunk]] = {}
        self._num_waiting = 0
        self._filled = asyncio.Event()
        self._is_urgent = asyncio.Event()  # an output has ended, or there is no room
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="decode outbox")

    async def stop(self) -> None:
        """What waits goes out first, if that takes no longer than FLUSH_S."""
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    while not self.is_empty():  # noqa: ASYNC110 - once in a role's life
                        await asyncio.sleep(FLUSH_POLL_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def is_empty(self) -> bool:
        """Nothing waits to be sent, nothing is being sent."""
        return self._num_waiting == 0

    def add(self, router_id: InstanceId, chunk: TokenChunk) -> None:
        self._waiting.setdefault(router_id, []).append(chunk)
        self._num_waiting += 1
        self._filled.set()
        if self._num_waiting >= MAX_WAITING_CHUNKS:
            self._has_room.clear()
        if chunk.is_last or not self._has_room.is_set():
            self._is_urgent.set()

    async def has_room(self) -> None:
        """Returns when fewer than MAX_WAITING_CHUNKS wait. Unbounded: the caller's requests have deadlines."""
        await self._has_room.wait()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = 0.0
        while True:
            await self._filled.wait()
            if not self._is_urgent.is_set() and loop.time() < next_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(next_s):
                        await self._is_urgent.wait()
            next_s = loop.time() + self._interval_s
            self._filled.clear()
            self._is_urgent.clear()
            waiting, self._waiting = self._waiting, {}
            for router_id, chunks in waiting.items():
                await self._send(router_id, joined(chunks))
                self._num_waiting -= len(chunks)
            if self._num_waiting < MAX_WAITING_CHUNKS:
                self._has_room.set()

    async def _send(self, router_id: InstanceId, chunks: list[TokenChunk]) -> None:
        try:
            for batch in batches(self._instance_id, chunks):
                await self._publish(stream_subject(router_id), batch)
        except Exception:  # a bug; its router sees a gap and ends these requests, the others must go on
            _log.exception("token chunks could not be sent", num_chunks=len(chunks))


def joined(chunks: Iterable[TokenChunk]) -> list[TokenChunk]:
    """Few chunks of each request, with all its tokens in order: one unless a slow bus let more than MAX_JOINED_TOKENS wait. One
    with KV is not joined: it may fill half a message by itself."""
    out: list[TokenChunk] = []
    last: dict[RequestId, int] = {}  # its place in out
    for chunk in chunks:
        at = last.get(chunk.request_id)
        if at is None or chunk.kv is not None or len(out[at].token_ids) + len(chunk.token_ids) > MAX_JOINED_TOKENS:
            last[chunk.request_id] = len(out)
            out.append(chunk)
        else:
            out[at] = _sum(out[at], chunk)
    return out


def _sum(before: TokenChunk, chunk: TokenChunk) -> TokenChunk:
    token_ids, logprobs = before.token_ids + chunk.token_ids, before.logprobs + chunk.logprobs
    return msgspec.structs.replace(chunk, seq=before.seq, token_ids=token_ids, logprobs=logprobs)


def batches(instance_id: InstanceId, chunks: Iterable[TokenChunk]) -> Iterator[TokenBatch]:
    """chunks in order, in as few batches as stay under the bus's limit."""
    batch: list[TokenChunk] = []
    num_bytes = 0
    for chunk in chunks:
        size = _max_bytes(chunk)
        if batch and num_bytes + size > BATCH_BYTES:
            yield TokenBatch(instance_id, tuple(batch))
            batch, num_bytes = [], 0
        batch.append(chunk)
        num_bytes += size
    if batch:
        yield TokenBatch(instance_id, tuple(batch))


def _max_bytes(chunk: TokenChunk) -> int:
    """Upper bound of the chunk's wire size."""
    size = CHUNK_BYTES + len(chunk.request_id.encode()) + TOKEN_BYTES * len(chunk.token_ids)
    size += LOGPROB_BYTES * sum(2 + len(logprobs.top) for logprobs in chunk.logprobs)
    if chunk.time is not None:
        size += TIME_BYTES + len(chunk.time.stage) + len(chunk.time.instance_id)
    if chunk.kv is not None:
        size += KV_BYTES + len(chunk.kv.block_keys) + len(chunk.kv.key_tail)
    if chunk.error is not None:
        error = chunk.error
        size += TIME_BYTES + sum(len(text.encode()) for text in (error.message, error.code, error.param or ""))
    return size
