"""The index that processes share, in Redis (6.2 or newer) or Valkey: a question is one round trip, hints go out in batches.

Nothing here may hurt a request: a question that is not answered in time knows nothing, and after some of those nobody is
asked for a while. Hints wait in a bounded table, where the latest word on a key replaces the one before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, get_args

import msgspec
import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from triptych.cache.index import MAX_HOLDERS, CacheIndex, Found, IndexCounters, Kind, MemoryIndex
from triptych.cache.redis_scripts import LOOKUP, UPDATE
from triptych.shared.errors import BadRequest
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import InstanceId
from triptych.shared.settings import Settings

T = TypeVar("T")

QUESTION_TIMEOUT_S = 0.25  # chosen: hundreds of times what it takes, and less than most of what a hit saves
HINTS_TIMEOUT_S = 5.0  # chosen: nobody waits for them
MAX_FAILURES = 3  # chosen: in a row; then the server is left alone
PAUSE_S = 2.0  # chosen: until it is tried again, by one question
MAX_CONNECTIONS = 8  # chosen: a question holds one for a millisecond
MAX_HINTS = 20_000  # chosen: about 5 MB
HINT_DELAY_S = 0.005  # chosen: so long the process that has a hint may be busy with the answer that it comes from
BATCH_SIZE = 512  # chosen: hints in one script, which holds up the server for about a millisecond

# RuntimeError: uvloop's word for a connection that was reset while it lay idle. ValueError: what answers is no Redis.
FAULTS = (RedisError, OSError, TimeoutError, msgspec.DecodeError, RuntimeError, ValueError)

_Answer = tuple[list[tuple[InstanceId, int]], list[tuple[InstanceId, ...]]]
_Fact = tuple[InstanceId, Kind, bytes]

_log = structlog.get_logger(__name__)
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode
_decode_image = msgspec.msgpack.Decoder(ImageInfo).decode
_encode_image = msgspec.msgpack.Encoder().encode


def open_index(settings: Settings, model_revision: str) -> CacheIndex:
    """The index of a process, on its event loop. It need not be there yet. Without a redis_url only this process knows of it.

    Raises:
        BadRequest: redis_url is no such URL.
    """
    if not settings.redis_url:
        return MemoryIndex()
    return RedisIndex(settings.redis_url, model_revision, settings.cache_ttl_s)


class RedisIndex:
    """CacheIndex over a Redis server. Entries end ttl_s after their last holder, or whoever asked for a file, named them."""

    def __init__(self, url: str, model_revision: str, ttl_s: float) -> None:
        self.counters = IndexCounters()
        self._prefix = f"triptych:{model_revision[:8]}:".encode()
        self._ttl_s = math.ceil(ttl_s)
        self._redis = _connect(url)
        self._lookup = self._redis.register_script(LOOKUP)
        self._update = self._redis.register_script(UPDATE)
        self._num_failures = 0
        self._skip_until = 0.0
        self._facts: dict[_Fact, bool] = {}
        self._images: dict[bytes, ImageInfo] = {}
        self._asking: set[asyncio.Future[Any]] = set()
        self._has_hints = asyncio.Event()
        self._is_closed = False
        self._publisher = asyncio.create_task(self._publish())

    async def identify(self, file_keys: Sequence[bytes]) -> list[ImageInfo | None]:
        async def ask() -> list[ImageInfo | None]:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key in file_keys:
                    pipeline.getex(self._file_name(key), ex=self._ttl_s)
                return [_image_in(value) for value in await pipeline.execute()]

        return await self._ask(ask) or [None] * len(file_keys)

    async def lookup(self, block_keys: Sequence[bytes], mm_hashes: Sequence[bytes]) -> Found:
        async def ask() -> Found:
            packed: Any = [b"".join(block_keys), b"".join(mm_hashes)]
            prefixes, holders = _decode_answer(await self._lookup(keys=[self._prefix], args=packed))
            return Found(dict(prefixes), {key: held for key, held in zip(mm_hashes, holders, strict=True) if held})

        return await self._ask(ask) or Found()

    def remember(self, file_key: bytes, image: ImageInfo) -> None:
        self._images[file_key] = image
        self._bound()

    def hold(self, holder: InstanceId, kind: Kind, keys: Iterable[bytes]) -> None:
        self._tell(holder, kind, keys, is_held=True)

    def drop(self, holder: InstanceId, kind: Kind, keys: Iterable[bytes]) -> None:
        self._tell(holder, kind, keys, is_held=False)

    async def close(self) -> None:
        self._is_closed = True
        self._has_hints.set()
        self._publisher.cancel()
        await asyncio.gather(self._publisher, *self._asking, return_exceptions=True)
        await self._redis.aclose()

    async def _ask(self, question: Callable[[], Awaitable[T]]) -> T | None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._skip_until:
            self.counters.num_skipped += 1
            return None
        if self._num_failures >= MAX_FAILURES:  # this question tries, the others wait for its result
            self._skip_until = now_s + PAUSE_S
        self.counters.num_round_trips += 1
        try:
            answer = await self._in_time(question)
        except FAULTS as error:
            self._has_failed(error)
            return None
        self._num_failures, self._skip_until = 0, 0.0
        return answer

    async def _in_time(self, question: Callable[[], Awaitable[T]]) -> T:
        """In a task of its own: most questions that are cancelled in redis-py 8.1 go on as if nothing were (measured), and
        whoever asked would be cancelled in vain."""
        asking = asyncio.ensure_future(question())
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            await asyncio.wait([asking], timeout=QUESTION_TIMEOUT_S)
            if not asking.done():
                raise TimeoutError
            return asking.result()
        finally:
            asking.cancel()

    def _has_failed(self, error: Exception) -> None:
        self.counters.num_failures += 1
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self._skip_until = asyncio.get_running_loop().time() + PAUSE_S
        if self._num_failures == MAX_FAILURES:
            _log.warning("the cache index does not answer, going on without it", error=type(error).__name__)

    def _tell(self, holder: InstanceId, kind: Kind, keys: Iterable[bytes], is_held: bool) -> None:
        for key in keys:
            fact = (holder, kind, key)
            self._facts.pop(fact, None)
            self._facts[fact] = is_held
        self._bound()

    def _bound(self) -> None:
        self.counters.num_lost += _shorten(self._facts) + _shorten(self._images)
        self._has_hints.set()

    async def _publish(self) -> None:
        """A full server may refuse hints and answer questions: these failures don't keep anyone from asking."""
        while not self._is_closed:  # redis-py may swallow what cancels it
            await self._has_hints.wait()
            await asyncio.sleep(HINT_DELAY_S)
            try:
                async with asyncio.timeout(HINTS_TIMEOUT_S):
                    await self._send_images(dict(islice(self._images.items(), BATCH_SIZE)))
                    await self._send_facts(dict(islice(self._facts.items(), BATCH_SIZE)))
            except FAULTS:
                self.counters.num_failures += 1
                await asyncio.sleep(PAUSE_S)  # what was not sent is still there
            if not self._images and not self._facts:
                self._has_hints.clear()

    async def _send_images(self, images: dict[bytes, ImageInfo]) -> None:
        if images:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key, image in images.items():
                    pipeline.set(self._file_name(key), _encode_image(image), ex=self._ttl_s)
                await pipeline.execute()
            _forget(self._images, images)

    async def _send_facts(self, facts: dict[_Fact, bool]) -> None:
        for holder, digests in _by_holder(facts).items():
            args: Any = [holder, self._ttl_s, MAX_HOLDERS, *(b"".join(keys) for keys in digests.values())]
            await self._update(keys=[self._prefix], args=args)
        _forget(self._facts, facts)

    def _file_name(self, file_key: bytes) -> bytes:
        return self._prefix + b"f" + file_key


def _by_holder(facts: Mapping[_Fact, bool]) -> dict[InstanceId, dict[tuple[Kind, bool], list[bytes]]]:
    """Keys of all that is held and not held any more, in the order of the script's arguments."""
    found: dict[InstanceId, dict[tuple[Kind, bool], list[bytes]]] = {}
    for (holder, kind, key), is_held in facts.items():
        if holder not in found:
            found[holder] = {(one, held): [] for one in get_args(Kind) for held in (True, False)}
        found[holder][kind, is_held].append(key)
    return found


def _connect(url: str) -> Redis:
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=HINTS_TIMEOUT_S,
            socket_timeout=HINTS_TIMEOUT_S,
            socket_connect_timeout=HINTS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),  # a connection from before the server's restart, or that a firewall has reset
            retry_on_error=[RuntimeError],
            protocol=2,  # has all that is used, and one round trip less to connect
        )
    except ValueError as error:
        raise BadRequest("bad setting: TRIPTYCH_REDIS_URL is no redis:// URL", code="bad_setting") from error
    return Redis.from_pool(pool)


def _image_in(value: bytes | None) -> ImageInfo | None:
    try:
        return None if value is None else _decode_image(value)
    except msgspec.DecodeError:  # somebody else's: the server is sound
        return None


def _shorten(hints: dict[Any, Any]) -> int:
    """Drops the oldest hints over the bound; how many."""
    excess = list(islice(hints, max(0, len(hints) - MAX_HINTS)))
    for key in excess:
        del hints[key]
    return len(excess)


def _forget(hints: dict[Any, Any], sent: dict[Any, Any]) -> None:
    for key, value in sent.items():
        if hints.get(key) == value:  # otherwise something else was said in the meantime
            del hints[key]
