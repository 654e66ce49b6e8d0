"""The cache index, in memory and in a real Valkey: what holders say is found, the latest word counts, all of it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop
from blake3 import blake3
from redis.asyncio import Redis

from support.own_server import OwnValkey
from triptych.cache import redis_index
from triptych.cache.index import MAX_HOLDERS, CacheIndex, Found, Kind, MemoryIndex
from triptych.cache.redis_index import RedisIndex, open_index
from triptych.shared.errors import BadRequest
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import InstanceId
from triptych.shared.settings import Settings

TIMEOUT_S = 20.0
REVISION = "0123456789abcdef"
KINDS: tuple[Kind, ...] = ("kv", "embeddings")
ONE, TWO, THREE = (InstanceId(f"prefill-{index}-5f3a2c1b") for index in range(3))


def digests(name: str, num_keys: int) -> list[bytes]:
    return [blake3(f"{name} {index}".encode()).digest() for index in range(num_keys)]


BLOCKS = digests("block", 10)
IMAGES = digests("image", 4)


def picture(mm_hash: bytes) -> ImageInfo:
    return ImageInfo(mm_hash, 448, 448, (1, 32, 32), 256)


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = TIMEOUT_S) -> None:
    """Hints take their time."""
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)


async def until_found(index: CacheIndex, wanted: Found, blocks: list[bytes] = BLOCKS) -> None:
    async def is_found() -> bool:
        found = await index.lookup(blocks, IMAGES)
        embeddings = {key: sorted(holders) for key, holders in found.embeddings.items()}
        return (found.prefixes, embeddings) == (wanted.prefixes, {key: sorted(h) for key, h in wanted.embeddings.items()})

    await until(is_found)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests take the cores: an answer may take longer here. A server that fails is tried again soon."""
    monkeypatch.setattr(redis_index, "QUESTION_TIMEOUT_S", 5.0)
    monkeypatch.setattr(redis_index, "PAUSE_S", 0.05)


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[OwnValkey]:
    server = await OwnValkey.start(tmp_path)
    yield server
    server.stop()


@pytest.fixture
async def shared(valkey: OwnValkey) -> AsyncIterator[RedisIndex]:
    made = RedisIndex(valkey.url, REVISION, 600)
    yield made
    await made.close()


@pytest.fixture
async def client(valkey: OwnValkey) -> AsyncIterator[Redis]:
    async with Redis.from_url(valkey.url) as made:
        yield made


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CacheIndex]:
    if request.param == "memory":
        yield MemoryIndex()
        return
    server = await OwnValkey.start(tmp_path)
    made = RedisIndex(server.url, REVISION, 600)
    yield made
    await made.close()
    server.stop()


async def test_nothing_is_known_at_first(index: CacheIndex) -> None:
    assert await index.lookup(BLOCKS, IMAGES) == Found()
    assert await index.lookup([], []) == Found()
    assert await index.identify(IMAGES) == [None] * len(IMAGES)
    assert await index.identify([]) == []


async def test_pictures_of_files(index: CacheIndex) -> None:
    files = digests("file", 3)
    index.remember(files[0], picture(IMAGES[0]))
    index.remember(files[2], picture(IMAGES[2]))

    async def are_known() -> bool:
        return await index.identify(files) == [picture(IMAGES[0]), None, picture(IMAGES[2])]

    await until(are_known)


async def test_a_prefix_ends_at_each_holder_s_first_gap(index: CacheIndex) -> None:
    index.hold(ONE, "kv", BLOCKS[:6])
    index.hold(TWO, "kv", [*BLOCKS[:2], *BLOCKS[3:]])
    index.hold(THREE, "kv", BLOCKS[1:])
    await until_found(index, Found({ONE: 6, TWO: 2}))
    index.hold(TWO, "kv", [BLOCKS[2]])
    index.drop(ONE, "kv", [BLOCKS[0]])
    await until_found(index, Found({TWO: 10}))


async def test_embeddings_and_blocks_are_told_apart(index: CacheIndex) -> None:
    index.hold(ONE, "embeddings", [*BLOCKS, IMAGES[1]])
    index.hold(TWO, "kv", [BLOCKS[0], *IMAGES])
    await until_found(index, Found({TWO: 1}, {IMAGES[1]: (ONE,)}))


async def test_the_latest_word_counts(index: CacheIndex) -> None:
    for _ in range(3):
        index.drop(ONE, "embeddings", IMAGES)
        index.hold(ONE, "embeddings", IMAGES[:2])
        index.hold(TWO, "embeddings", IMAGES[:1])
        index.drop(TWO, "embeddings", IMAGES[:1])
    await until_found(index, Found({}, {IMAGES[0]: (ONE,), IMAGES[1]: (ONE,)}))
    index.drop(THREE, "embeddings", IMAGES[:1])
    index.drop(ONE, "embeddings", IMAGES[1:2])
    await until_found(index, Found({}, {IMAGES[0]: (ONE,)}))


async def test_the_first_of_too_many_holders_are_forgotten(index: CacheIndex) -> None:
    holders = [InstanceId(f"encoder-{number}-5f3a2c1b") for number in range(MAX_HOLDERS + 2)]
    for holder in holders:
        index.hold(holder, "embeddings", IMAGES[:1])
    await until_found(index, Found({}, {IMAGES[0]: tuple(holders[2:])}))
    index.hold(holders[2], "embeddings", IMAGES[:1])  # said again
    index.hold(holders[0], "embeddings", IMAGES[:1])
    await until_found(index, Found({}, {IMAGES[0]: (*holders[4:], holders[2], holders[0])}))


async def test_long_prompts(index: CacheIndex) -> None:
    blocks = digests("long", 1000)
    for begin in range(0, 1000, 100):
        index.hold(ONE, "kv", blocks[begin : begin + 100])
    index.hold(TWO, "kv", blocks[:64])
    await until_found(index, Found({ONE: 1000, TWO: 64}), blocks)


async def test_a_question_is_one_round_trip(index: CacheIndex) -> None:
    await index.lookup(BLOCKS, IMAGES)
    await index.identify(IMAGES)
    assert (index.counters.num_round_trips, index.counters.num_failures) == (2, 0)


@pytest.mark.parametrize("seed", range(3))
async def test_the_shared_index_knows_what_the_one_in_memory_knows(shared: RedisIndex, seed: int) -> None:
    rng = random.Random(seed)
    memory = MemoryIndex()
    for _ in range(300):
        holder, kind = rng.choice([ONE, TWO, THREE]), rng.choice(KINDS)
        keys = rng.sample(BLOCKS + IMAGES, rng.randint(1, 8))
        is_dropped = rng.random() < 0.2
        for index in (shared, memory):
            (index.drop if is_dropped else index.hold)(holder, kind, keys)
        await asyncio.sleep(0)  # so that some are on their way when others come
    await until_found(shared, await memory.lookup(BLOCKS, IMAGES))


async def test_every_key_ends_and_a_block_takes_under_1_kb(shared: RedisIndex, client: Redis) -> None:
    before = (await client.info("memory"))["used_memory"]
    blocks = digests("many", 2000)
    for holder in (ONE, TWO, THREE):
        shared.hold(holder, "kv", blocks)
    await until_found(shared, Found(dict.fromkeys((ONE, TWO, THREE), 2000)), blocks)
    used = (await client.info("memory"))["used_memory"] - before
    assert 100 < used / 2000 < 1000
    shared.hold(ONE, "embeddings", IMAGES)
    shared.drop(ONE, "kv", blocks[:10])
    shared.remember(IMAGES[0], picture(IMAGES[0]))
    await until_found(shared, Found({TWO: 2000, THREE: 2000}, dict.fromkeys(IMAGES, (ONE,))), blocks)
    names = [name async for name in client.scan_iter(count=1000)]
    assert len(names) == 2000 + len(IMAGES) + 1
    assert all([0 < await client.ttl(name) <= 600 for name in names])


async def test_each_holder_s_word_ends_on_its_own(valkey: OwnValkey, shared: RedisIndex) -> None:
    brief = RedisIndex(valkey.url, REVISION, 2)
    shared.hold(TWO, "kv", BLOCKS[:3])
    await until_found(shared, Found({TWO: 3}))
    brief.hold(ONE, "kv", BLOCKS)
    await until_found(shared, Found({ONE: 10, TWO: 3}))
    await until_found(shared, Found({TWO: 3}))
    await brief.close()


async def test_a_flush_forgets_entries_and_scripts(shared: RedisIndex, client: Redis) -> None:
    shared.hold(ONE, "kv", BLOCKS)
    await until_found(shared, Found({ONE: 10}))
    await client.flushall()
    await client.script_flush()
    assert await shared.lookup(BLOCKS, IMAGES) == Found()
    await client.script_flush()
    shared.hold(ONE, "kv", BLOCKS[:4])
    await until_found(shared, Found({ONE: 4}))
    assert shared.counters.num_failures == 0


async def test_a_server_that_restarts(shared: RedisIndex, valkey: OwnValkey) -> None:
    shared.hold(ONE, "kv", BLOCKS)
    await until_found(shared, Found({ONE: 10}))
    valkey.stop()
    for _ in range(20):
        assert await shared.lookup(BLOCKS, IMAGES) == Found()
        assert await shared.identify(IMAGES) == [None] * len(IMAGES)
    assert shared.counters.num_failures >= redis_index.MAX_FAILURES
    assert shared.counters.num_skipped > 0, "a server that is down is asked every time"
    shared.hold(TWO, "kv", BLOCKS[:5])
    await valkey.start_again()
    await until_found(shared, Found({TWO: 5}))


async def test_a_server_that_hangs_costs_one_timeout(
    shared: RedisIndex, valkey: OwnValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.hold(ONE, "kv", BLOCKS)
    await until_found(shared, Found({ONE: 10}))
    monkeypatch.setattr(redis_index, "QUESTION_TIMEOUT_S", 0.1)
    monkeypatch.setattr(redis_index, "PAUSE_S", 60.0)
    os.kill(valkey.pid, signal.SIGSTOP)
    async with asyncio.timeout(5):
        found = [await shared.lookup(BLOCKS, IMAGES) for _ in range(100)]
    assert found == [Found()] * 100
    assert shared.counters.num_failures == redis_index.MAX_FAILURES
    assert shared.counters.num_skipped == 100 - redis_index.MAX_FAILURES


async def test_an_answer_that_comes_too_late_is_nobody_else_s(
    shared: RedisIndex, valkey: OwnValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.hold(ONE, "kv", BLOCKS)
    await until_found(shared, Found({ONE: 10}))
    monkeypatch.setattr(redis_index, "MAX_FAILURES", 1000)
    monkeypatch.setattr(redis_index, "QUESTION_TIMEOUT_S", 0.1)
    os.kill(valkey.pid, signal.SIGSTOP)
    assert await asyncio.gather(*(shared.lookup(BLOCKS, IMAGES) for _ in range(20))) == [Found()] * 20
    os.kill(valkey.pid, signal.SIGCONT)
    monkeypatch.setattr(redis_index, "QUESTION_TIMEOUT_S", 5.0)
    lengths = range(11)
    found = await asyncio.gather(*(shared.lookup(BLOCKS[:length], []) for length in lengths))
    assert found == [Found({ONE: length} if length else {}) for length in lengths]


class Resetting:
    """Between an index and its server: `reset` is what a load balancer does to connections that lie idle."""

    def __init__(self, server: OwnValkey) -> None:
        self._target = urlsplit(server.url)
        self._writers: list[asyncio.StreamWriter] = []

    async def listen(self) -> str:
        """Its address, in place of the server's."""
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._listener.sockets[0].getsockname()[1]
        return self._target._replace(netloc=f":{self._target.password}@127.0.0.1:{port}").geturl()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        to_reader, to_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        with contextlib.suppress(OSError, RuntimeError):
            await asyncio.gather(_forward(reader, to_writer), _forward(to_reader, writer))

    def reset(self) -> int:
        """How many there were."""
        writers, self._writers = self._writers, []
        for writer in writers:
            at_once = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.transport.abort()
        return len(writers)

    async def close(self) -> None:
        self._listener.close()
        self.reset()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


def test_connections_that_are_reset_while_idle(tmp_path: Path) -> None:
    """On the services' event loop, which has a word of its own for that."""

    async def run() -> None:
        server = await OwnValkey.start(tmp_path)
        between = Resetting(server)
        index = RedisIndex(await between.listen(), REVISION, 600)

        async def are_lost() -> bool:
            idle = index._redis.connection_pool._available_connections
            return all(one._reader is None or one._reader.exception() is not None for one in idle)

        try:
            for length in range(1, 5):
                index.hold(ONE, "kv", BLOCKS[:length])
                await until_found(index, Found({ONE: length}))
                assert between.reset() > 0
                await until(are_lost)
                assert (await index.lookup(BLOCKS, IMAGES)).prefixes == {ONE: length}, "asked again, over another connection"
            assert index.counters.num_failures == 0
        finally:
            await index.close()
            await between.close()
            server.stop()

    uvloop.run(run())


async def test_a_full_server_is_still_asked(shared: RedisIndex, client: Redis) -> None:
    shared.hold(ONE, "kv", BLOCKS)
    await until_found(shared, Found({ONE: 10}))
    await client.config_set("maxmemory-policy", "noeviction")
    await client.config_set("maxmemory", "1")
    shared.hold(TWO, "kv", BLOCKS)

    async def has_failed() -> bool:
        return shared.counters.num_failures > redis_index.MAX_FAILURES

    await until(has_failed)
    assert await shared.lookup(BLOCKS, IMAGES) == Found({ONE: 10})
    await client.config_set("maxmemory", "0")
    await until_found(shared, Found({ONE: 10, TWO: 10}))


async def test_hints_nobody_takes_are_bounded(shared: RedisIndex, valkey: OwnValkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_index, "MAX_HINTS", 8)
    valkey.stop()
    shared.hold(ONE, "kv", BLOCKS)
    shared.hold(TWO, "kv", BLOCKS[8:])
    shared.remember(IMAGES[0], picture(IMAGES[0]))
    assert shared.counters.num_lost == 4
    await valkey.start_again()
    shared.hold(THREE, "kv", BLOCKS[:4])
    await until_found(shared, Found({THREE: 4}))


STRANGE = (b"", b"text", b"\xc1", b"\x05", b"\x92\xa1a", b"\x92\x01\x02", b"\x93\xa1a\xa1b\xa1c", b"\x81\xa1a\x01")


@pytest.mark.parametrize("value", [*STRANGE, None])
async def test_strange_values_are_none(shared: RedisIndex, client: Redis, value: bytes | None) -> None:
    """Nobody else is to write there. One that did must not keep a question, or a batch of hints, from its answer."""
    names = [shared._prefix + kind + key for kind, key in ((b"k", BLOCKS[1]), (b"e", IMAGES[0]), (b"f", IMAGES[1]))]
    for name in names:
        await (client.lpush(name, b"list") if value is None else client.set(name, value))  # type: ignore[misc]
    shared.hold(TWO, "kv", [BLOCKS[0]])
    shared.hold(TWO, "embeddings", [IMAGES[1]])
    await until_found(shared, Found({TWO: 1}, {IMAGES[1]: (TWO,)}))
    if value is not None:
        assert await shared.identify(IMAGES[:2]) == [None, None]
    shared.hold(ONE, "kv", BLOCKS)
    shared.drop(ONE, "embeddings", IMAGES[:1])
    await until_found(shared, Found({ONE: 10, TWO: 1}, {IMAGES[1]: (TWO,)}))
    assert shared.counters.num_failures == 0
    assert not await client.exists(names[1])


async def test_without_a_url_only_this_process_knows() -> None:
    assert isinstance(open_index(Settings(), REVISION), MemoryIndex)


async def test_a_url_that_is_none() -> None:
    with pytest.raises(BadRequest, match="REDIS_URL") as refused:
        open_index(Settings(redis_url="http://user:secret@host"), REVISION)
    assert "secret" not in str(refused.value)


async def test_a_server_that_is_not_there_yet(valkey: OwnValkey) -> None:
    valkey.stop()
    index = open_index(Settings(redis_url=valkey.url), REVISION)
    assert await index.lookup(BLOCKS, IMAGES) == Found()
    index.hold(ONE, "kv", BLOCKS)
    await valkey.start_again()
    await until_found(index, Found({ONE: 10}))
    await index.close()


async def test_whoever_asks_can_be_cancelled_at_any_moment(shared: RedisIndex) -> None:
    """A client that leaves cancels what its request waits for."""
    for question in (lambda: shared.identify([b"f" * 32] * 4), lambda: shared.lookup([b"k" * 32] * 20, [b"m" * 32])):
        for num_turns in range(30):
            asking = asyncio.ensure_future(question())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            if not asking.done():
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
