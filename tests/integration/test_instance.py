"""Instances with the tiny checkpoint on a real NATS server: encode, prefill and decode by hand-made messages."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pytest
import torch
from blake3 import blake3

from support.own_server import OwnNats
from triptych.services.instance import InstanceService, make_service
from triptych.shared.bus import Bus
from triptych.shared.checkpoint import Checkpoint, image_info, open_checkpoint
from triptych.shared.engine.api import Chunk, ImageSpan, Sequence
from triptych.shared.engine.torch_engine import TorchEngine, load_engine
from triptych.shared.errors import InternalError, Overloaded
from triptych.shared.image_info import ImageInfo
from triptych.shared.instance_info import Resources, TransportAddress
from triptych.shared.messages import (
    HEARTBEAT_SUBJECT,
    Accepted,
    DecodeRequest,
    EncodeReply,
    EncodeRequest,
    Event,
    HandOverRequest,
    Heartbeat,
    InstanceId,
    InstanceRequest,
    Message,
    PlacedImage,
    PrefillReply,
    PrefillRequest,
    PrefixSource,
    PromptTokens,
    ReleaseRequest,
    RequestId,
    Role,
    TokenBatch,
    stream_subject,
)
from triptych.shared.registry import Registry
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.service import ServiceContext
from triptych.shared.settings import Settings
from triptych.shared.token_bytes import pack_tokens
from triptych.shared.transport.transport import InstanceTransport

ROUTER = InstanceId("router-0-test")
TIMEOUT_S = 60.0
M = TypeVar("M", bound=Message)


async def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {TIMEOUT_S} s: {what}"
        await asyncio.sleep(0.005)


class Peer:
    """A process's worth of bus, registry and transport: an instance's, or the test's own."""

    def __init__(self, name: str, settings: Settings, bus: Bus) -> None:
        self.registry = Registry(heartbeat_timeout_s=3600.0)
        self.context = ServiceContext(settings, InstanceId(name), name, bus, self.registry, "", "127.0.0.1")

    async def join(self) -> None:
        await self.context.bus.listen(HEARTBEAT_SUBJECT, lambda event: self.registry.on_event(event, time.monotonic()))

    async def beat(self, roles: tuple[Role, ...], address: TransportAddress) -> None:
        name = self.context.instance_id
        beat = Heartbeat(name, name, "instance", "ready", roles, "", 1.0, "", (), Resources(0, 0), None, address)
        await self.context.bus.publish_event(HEARTBEAT_SUBJECT, beat)


class Router:
    """What a router does, by hand: sends one request through the stages, keeps what is streamed."""

    def __init__(self, peer: Peer, checkpoint: Checkpoint) -> None:
        self.peer, self.checkpoint = peer, checkpoint
        self.instances: dict[str, InstanceService] = {}
        self.streams: dict[str, list[Any]] = {}
        self.transport: InstanceTransport
        self._count = itertools.count()

    async def start(self, settings: Settings) -> None:
        bus, name = self.peer.context.bus, self.peer.context.instance_id
        self.transport = InstanceTransport(name, bus, "127.0.0.1", settings.tensor_store_bytes, settings.transport)
        await self.transport.start()
        await self.peer.join()
        await bus.serve(name, self._serve)
        await bus.listen(stream_subject(ROUTER), self._on_tokens)

    async def _serve(self, request: InstanceRequest) -> Message | None:
        """The test holds the pixels, as preprocess does."""
        owner: Any = self.transport
        match type(request).__name__:
            case "PullRequest":
                return cast(Message, await owner.on_pull(request))
            case "PairRequest":
                return cast(Message, await owner.on_pair(request))
            case "PullDone":
                owner.on_pull_done(request)
        return None

    def _on_tokens(self, event: Event) -> None:
        assert isinstance(event, TokenBatch)
        for chunk in event.chunks:
            self.streams.setdefault(chunk.request_id, []).append(chunk)

    async def ask(self, name: str, message: Message, kind: type[M]) -> M:
        reply = await self.peer.context.bus.request(InstanceId(name), message, TIMEOUT_S)
        assert isinstance(reply, kind), reply
        return reply

    async def generate(
        self, stages: tuple[str, str, str], case: Case, prefix: PrefixSource | None = None, via: tuple[str, ...] = ()
    ) -> list[int]:
        """encoder, prefill, decode; the output's tokens. prefix: images whose KV is there are not encoded. via: decode hands
        the request over, these go on with it, one after the other."""
        encoder, prefill, decode = stages
        request_id = RequestId(f"r{next(self._count)}")
        placed = []
        num_covered = 0 if prefix is None else prefix.num_blocks * self.peer.context.settings.block_size
        for offset, (image, pixels) in case.images.items():
            if offset + image.num_tokens <= num_covered:
                placed.append(PlacedImage(image, offset))
                continue
            ref = await self.transport.put(pixels, request_id, TIMEOUT_S)
            encode = EncodeRequest(request_id, ROUTER, image, ref, TIMEOUT_S)
            placed.append(PlacedImage(image, offset, (await self.ask(encoder, encode, EncodeReply)).embeddings))
        prompt = await self._prompt(case.token_ids, request_id)
        request = PrefillRequest(request_id, ROUTER, prompt, tuple(placed), case.sampling, TIMEOUT_S, prefix=prefix)
        reply = await self.ask(prefill, request, PrefillReply)
        assert reply.kv is not None
        assert reply.num_cached_tokens >= num_covered
        output, kv, here = [reply.first_token], reply.kv, decode
        for there in (*via, None):
            request_d = DecodeRequest(
                request_id, ROUTER, kv, pack_tokens(output), len(case.token_ids), case.sampling, TIMEOUT_S
            )
            chunks = self.streams[request_id] = []
            await self.ask(here, request_d, Accepted)
            if there is not None:
                await until(lambda: len(self.streams[request_id]) > 1, f"{request_id} runs")
                await self.ask(here, HandOverRequest(), Accepted)
            await until(lambda: bool(self.streams[request_id]) and self.streams[request_id][-1].is_last, f"{request_id} ends")
            assert chunks[-1].error is None, chunks[-1]
            assert chunks[0].seq == len(output)
            output += [token for chunk in chunks for token in chunk.token_ids]
            if chunks[-1].kv is None:
                break
            kv, here = chunks[-1].kv, str(there)
        for name in {*stages, *via}:
            await self.peer.context.bus.publish(InstanceId(name), ReleaseRequest(request_id))
        return output

    async def _prompt(self, token_ids: list[int], request_id: RequestId) -> PromptTokens:
        data = pack_tokens(token_ids)
        if len(token_ids) % 2:
            return PromptTokens(len(token_ids), inline=data)
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return PromptTokens(len(token_ids), leased=await self.transport.put(stored, request_id, TIMEOUT_S))


class Case:
    """A prompt with pictures at random places, and a direct engine run of it."""

    def __init__(self, seed: int, checkpoint: Checkpoint, temperature: float = 0.0, max_tokens: int = 12) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.sampling = SamplingParams(max_tokens, temperature=temperature, seed=seed)
        self.token_ids: list[int] = []
        self.images: dict[int, tuple[ImageInfo, torch.Tensor]] = {}
        for part in range(1 + seed % 3):
            if part:
                image, pixels = _picture(rng, checkpoint)
                self.images[len(self.token_ids)] = image, pixels
                self.token_ids += [checkpoint.image_token_id] * image.num_tokens
            num_text = int(torch.randint(3, 40, (1,), generator=rng))
            self.token_ids += torch.randint(0, 1000, (num_text,), generator=rng).tolist()

    def next_turn(self, answer: list[int]) -> Case:
        """The same conversation, answered, with another question."""
        turn = copy.copy(self)
        turn.token_ids = [*self.token_ids, *answer, 7, 8, 9, len(answer)]
        return turn

    def run(self, engine: TorchEngine) -> list[int]:
        """Alone and whole, on one engine."""
        infos, pixels = [one for one, _ in self.images.values()], [one for _, one in self.images.values()]
        embeddings = engine.encode(infos, pixels) if infos else []
        spans = [ImageSpan(o, i, e) for o, i, e in zip(self.images, infos, embeddings, strict=True)]
        sequence = Sequence(RequestId("direct"), list(self.token_ids), len(self.token_ids), self.sampling, spans)
        total = len(self.token_ids) + self.sampling.max_tokens
        sequence.block_table = engine.block_pool.allocate(-(-total // engine.block_size))
        engine.prepare(sequence)
        while sequence.num_output_tokens < self.sampling.max_tokens:
            [token] = engine.run([Chunk(sequence, len(sequence.token_ids) - sequence.num_computed_tokens)])
            assert token is not None
            sequence.token_ids.append(token)
        engine.block_pool.free(sequence.block_table)
        return sequence.token_ids[len(self.token_ids) :]


def _picture(rng: torch.Generator, checkpoint: Checkpoint) -> tuple[ImageInfo, torch.Tensor]:
    unit = checkpoint.image.patch_size * checkpoint.image.merge_size
    height, width = (unit * int(n) for n in torch.randint(2, 5, (2,), generator=rng))
    pixels = torch.randint(0, 256, (height, width, 3), generator=rng, dtype=torch.uint8)
    return image_info(height, width, checkpoint.image, blake3(pixels.numpy().tobytes()).digest()), pixels


@pytest.fixture
async def router(tiny_checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Router]:
    """Three instances: `ep` encodes and prefills, `d` decodes, `all` does everything. All blocks are free at the end."""
    given: dict[str, Any] = {"kv_cache_bytes": 1 << 20, "block_size": 16} | getattr(request, "param", {})
    settings = Settings(model=str(tiny_checkpoint), tensor_store_bytes=16 << 20, max_prefill_tokens=24, threads=1, **given)
    async with AsyncExitStack() as stack:
        nats = await OwnNats.start(tmp_path)
        stack.callback(nats.stop)
        peers: list[Peer] = []
        for name in ("test", "ep", "d", "all"):
            bus = await Bus.connect(nats.url, name)
            stack.push_async_callback(bus.close)
            peers.append(Peer(name, settings, bus))
        router = Router(peers[0], open_checkpoint(str(tiny_checkpoint)))
        await router.start(settings)
        stack.push_async_callback(router.transport.close)
        roles: list[tuple[Role, ...]] = [("encoder", "prefill"), ("decode",), ("encoder", "prefill", "decode")]
        for peer, its in zip(peers[1:], roles, strict=True):
            service = cast(InstanceService, make_service(settings, its))
            await peer.join()
            await service.start(peer.context)
            stack.push_async_callback(service.stop)
            await peer.context.bus.serve(peer.context.instance_id, service.handle)
            router.instances[peer.context.instance_id] = service
        await router.peer.beat((), router.transport.address)
        for peer, service in zip(peers[1:], router.instances.values(), strict=True):
            report = service.report()
            assert report.transport is not None
            await peer.beat(report.roles, report.transport)
        await until(lambda: all(len(peer.registry.all()) == len(peers) for peer in peers), "all know each other")
        yield router
        for name, service in router.instances.items():
            await until(service.is_idle, f"{name} is idle")
            report = service.report()
            assert report.resources is not None
            assert report.resources.num_free_blocks + report.resources.num_cached_blocks == report.resources.num_blocks > 0
            service._context.engine.block_pool.check_integrity()


@pytest.mark.parametrize("router", [{"transport": "auto"}, {"transport": "gloo"}], indirect=True, ids=["auto", "gloo"])
async def test_three_stages_equal_a_direct_run(router: Router, tiny_checkpoint: Path) -> None:
    """Split over two instances, alone in one, and mixed; alone and all at once; greedy and sampled."""
    engine = load_engine(router.checkpoint, Settings(kv_cache_bytes=1 << 20))
    cases = [Case(seed, router.checkpoint, temperature=0.8 * (seed % 2)) for seed in range(6)]
    expected = [case.run(engine) for case in cases]
    assert await router.generate(("ep", "ep", "d"), cases[2]) == expected[2]
    assert await router.generate(("all", "all", "all"), cases[2]) == expected[2]
    ways = [("ep", "ep", "d"), ("all", "all", "all"), ("ep", "all", "d"), ("all", "ep", "all")]
    pairs = [(way, i) for way in ways for i in range(len(cases))]
    outputs = await asyncio.gather(*(router.generate(way, cases[i]) for way, i in pairs))
    assert outputs == [expected[i] for _, i in pairs]


async def test_the_next_turn_goes_on_from_what_others_hold(router: Router) -> None:
    """From the decode instance's blocks, then from its own; no picture is encoded again."""
    engine = load_engine(router.checkpoint, Settings(kv_cache_bytes=1 << 20))
    metrics = router.instances["all"]._context.metrics
    for seed in range(1, 6):
        case = Case(seed, router.checkpoint)
        answer = await router.generate(("ep", "ep", "d"), case)
        assert answer == case.run(engine)
        turn = case.next_turn(answer)
        held = PrefixSource(InstanceId("d"), (len(case.token_ids) + len(answer) - 1) // 16)
        for _ in range(2):
            assert await router.generate(("all", "all", "all"), turn, held) == turn.run(engine)
    assert metrics.kv_pulls._value.get() == 5
    assert metrics.images._value.get() == 0


@pytest.mark.parametrize("router", [{"max_engine_failures": 3}], indirect=True, ids=["3 failures"])
async def test_an_engine_that_fails_every_call_ends_its_instance(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request gets an answer; the instance says itself that it is no good, and takes no more."""
    instance = router.instances["ep"]
    engine, lifecycle = instance._context.engine, instance._frame.lifecycle

    def run(chunks: Any) -> list[int | None]:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine, "run", run)
    prompt = PromptTokens(3, inline=pack_tokens((1, 2, 3)))
    for i in range(3):
        assert not lifecycle.drain_asked.is_set()
        request = PrefillRequest(RequestId(f"r{i}"), ROUTER, prompt, (), SamplingParams(4), TIMEOUT_S)
        with pytest.raises(InternalError, match="computing the prompt failed"):
            await router.ask("ep", request, PrefillReply)
    assert (lifecycle.state, lifecycle.exit_code, lifecycle.exit_asked.is_set()) == ("failing", 1, True)
    with pytest.raises(Overloaded):
        await router.ask("ep", request, PrefillReply)


@pytest.mark.parametrize("router", [{"kv_cache_bytes": 288 << 10, "block_size": 4}], indirect=True, ids=["48 blocks"])
async def test_many_requests_in_little_memory(router: Router) -> None:
    """More than the pools hold at once: prompts wait, sequences are preempted, tokens stay the same."""
    cases = [Case(seed, router.checkpoint, max_tokens=24) for seed in range(16)]
    alone = [await router.generate(("ep", "ep", "d"), case) for case in cases]
    for way in (("ep", "ep", "d"), ("all", "all", "all")):
        assert await asyncio.gather(*(router.generate(way, case) for case in cases)) == alone
    decode: Any = router.instances["d"]._roles.get("decode")
    assert decode.num_preemptions > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
async def test_requests_that_are_handed_over_give_the_same_tokens(router: Router, temperature: float) -> None:
    """With pictures; drawn ones with penalties, whose counts go on."""
    shaping = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "min_tokens": 30} if temperature else {}
    cases = [Case(seed, router.checkpoint, temperature, max_tokens=150) for seed in range(4)]
    for case in cases:
        case.sampling = msgspec.structs.replace(case.sampling, **shaping)
    alone = [await router.generate(("ep", "ep", "d"), case) for case in cases]
    moved = [await router.generate(("ep", "ep", "d"), case, via=("all", "d", "all")) for case in cases]
    assert moved == alone
