"""Instances with fake engines on a fake bus in one process: real roles, host and transport, no NATS and no model."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from blake3 import blake3

from support.fake_engine import FakeEngine, expected_tokens
from triptych.services.engine_host import open_host
from triptych.services.host_context import HostContext
from triptych.services.instance import InstanceService
from triptych.services.instance_parts import integrity_error
from triptych.shared.bus import Bus
from triptych.shared.errors import DeadlineExceeded, InstanceLost, TriptychError, from_wire
from triptych.shared.image_info import ImageInfo
from triptych.shared.instance_info import Resources
from triptych.shared.messages import (
    Accepted,
    DecodeRequest,
    EncodeReply,
    EncodeRequest,
    Event,
    HandOverRequest,
    Heartbeat,
    InstanceId,
    KvRef,
    Message,
    PlacedImage,
    PrefillReply,
    PrefillRequest,
    PromptTokens,
    ReleaseRequest,
    RequestId,
    Role,
    SwitchReply,
    SwitchRequest,
    TensorRef,
    TokenBatch,
    TokenChunk,
    stream_subject,
)
from triptych.shared.registry import Registry
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.service import ServiceContext
from triptych.shared.settings import Settings
from triptych.shared.token_bytes import pack_tokens
from triptych.shared.transport.transport import InstanceTransport
from triptych.shared.wire import decode_event, decode_request, encode

ROUTER = InstanceId("router-0-test")
WAIT_S = 10.0


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that other tasks make true."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {WAIT_S} s: {what}"
        await asyncio.sleep(0.001)


class FakeBus:
    """Requests go to the hosts' `handle`, through the wire form; events are kept by subject."""

    def __init__(self) -> None:
        self.hosts: dict[InstanceId, Callable[[Any], Any]] = {}
        self.events: dict[str, list[Event]] = defaultdict(list)
        self.is_blocked = asyncio.Event()
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Any:
        if instance_id not in self.hosts:
            raise InstanceLost("gone", instance_id=instance_id)
        try:
            async with asyncio.timeout(timeout_s):
                return await self.hosts[instance_id](decode_request(encode(message)))
        except TimeoutError:
            raise DeadlineExceeded from None

    async def publish(self, instance_id: InstanceId, message: Message) -> None:
        if instance_id in self.hosts:
            await self.hosts[instance_id](decode_request(encode(message)))

    async def publish_event(self, subject: str, event: Event) -> None:
        if not self.is_open.is_set():
            self.is_blocked.set()
            await self.is_open.wait()
        self.events[subject].append(decode_event(encode(event)))


class FakeHost(InstanceService):
    """An InstanceService whose engine is given."""

    def __init__(self, settings: Settings, roles: tuple[Role, ...], engine: FakeEngine) -> None:
        super().__init__(settings, roles)
        self.engine = engine

    async def _open(self) -> HostContext:
        return await open_host(self._frame, self.engine, self._thread, self._tasks)

    @property
    def pool(self) -> Any:
        return self.engine.block_pool

    @property
    def role(self) -> Any:
        [name] = self._names
        return self._roles.get(name)

    @property
    def transport(self) -> Any:
        return cast(InstanceTransport, self._context.transport)


@dataclass
class Stream:
    """What a router received of one request. kv: it was handed over, and goes on nowhere yet."""

    token_ids: list[int] = field(default_factory=list)
    last: TokenChunk | None = None
    kv: KvRef | None = None
    num_moves: int = 0
    num_signs: int = 0

    @property
    def error_code(self) -> str | None:
        return self.last.error.code if self.last is not None and self.last.error is not None else None


class FakeCluster:
    """Starts hosts, speaks to them as a router does, and checks at the end that everything was given back."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)
        self.bus = FakeBus()
        self.registry = Registry(heartbeat_timeout_s=1e9)
        self.hosts: dict[InstanceId, FakeHost] = {}

    async def start(self, name: str, roles: Sequence[Role], engine: FakeEngine | None = None) -> FakeHost:
        """One more instance; its id is its name."""
        host = FakeHost(self.settings, tuple(roles), engine or FakeEngine())
        instance_id = InstanceId(name)
        context = ServiceContext(self.settings, instance_id, name, cast(Bus, self.bus), self.registry, "", "127.0.0.1")

        async def announce() -> None:
            self.beat(instance_id)

        context.announce = announce
        await host.start(context)
        self.hosts[instance_id] = host
        self.bus.hosts[instance_id] = host.handle
        self.beat(instance_id)
        return host

    def beat(self, instance_id: InstanceId) -> None:
        report = self.hosts[instance_id].report()
        resources = report.resources or Resources(0, 0)
        heartbeat = Heartbeat(
            instance_id, instance_id, "instance", "ready", report.roles, "", 1.0, "", report.loads, resources,
            report.model, report.transport, takes_follow_ups=report.takes_follow_ups,
        )  # fmt: skip
        self.registry.on_event(heartbeat, time.monotonic())

    async def stop(self, is_clean: bool = True) -> None:
        """Stop all, after checking that nothing is held any more."""
        try:
            if is_clean:
                for name, host in self.hosts.items():
                    await self.until_at_rest(name)
                    assert host._context.metrics.integrity_failures._value.get() == 0
        finally:
            for host in self.hosts.values():
                await host.stop()

    async def until_at_rest(self, name: str) -> None:
        """All blocks free or only cached, no lease, nothing running; counts agree."""
        host = self.hosts[InstanceId(name)]
        try:
            await until(host.is_idle, f"{name} is idle")
        except AssertionError as error:
            raise AssertionError(f"{error}: {host.report()}") from None
        assert integrity_error(host._context) is None, host.report()
        host.transport.check_integrity()
        assert host.transport.usage()[0] == 0
        loads = [(load.num_waiting, load.num_running, load.num_pending_tokens) for load in host.report().loads]
        assert loads == [(0, 0, 0)] * len(loads)

    # --- what a router does --------------------------------------------------------------------------------------------

    async def put_pixels(self, name: str, value: int, request_id: str, size: int = 4) -> TensorRef:
        pixels = torch.full((size, size, 3), value, dtype=torch.uint8)
        return await self.hosts[InstanceId(name)].transport.put(pixels, RequestId(request_id), 60.0)

    async def encode(
        self, name: str, request_id: str, pixels: TensorRef, num_tokens: int = 3, timeout_s: float = WAIT_S
    ) -> EncodeReply:
        """Each one is a picture that was never seen before."""
        return await self.encode_image(
            name, request_id, image_info(num_tokens, pixels.shape[0], pixels.tensor_id), pixels, timeout_s
        )

    async def encode_image(
        self, name: str, request_id: str, image: ImageInfo, pixels: TensorRef | None = None, timeout_s: float = WAIT_S
    ) -> EncodeReply:
        request = EncodeRequest(RequestId(request_id), ROUTER, image, pixels, timeout_s)
        return cast(EncodeReply, await self.bus.request(InstanceId(name), request, WAIT_S))

    async def prefill(self, name: str, request: PrefillRequest) -> PrefillReply:
        return cast(PrefillReply, await self.bus.request(InstanceId(name), request, WAIT_S))

    async def decode(
        self, name: str, request: PrefillRequest, reply: PrefillReply, timeout_s: float = WAIT_S, whole: bool = False
    ) -> None:
        assert reply.kv is not None
        await self._decode(name, request, reply.kv, [reply.first_token], timeout_s, whole)

    async def go_on(self, name: str, request: PrefillRequest, reply: PrefillReply, is_long: bool = False) -> None:
        """At another instance, after it was handed over. is_long: as if its output so far were too long for a message."""
        stream = self.stream(request.request_id)
        assert stream.kv is not None
        await self._decode(name, request, stream.kv, [reply.first_token, *stream.token_ids], is_long=is_long)

    async def _decode(
        self,
        name: str,
        request: PrefillRequest,
        kv: KvRef,
        output: list[int],
        timeout_s: float = WAIT_S,
        whole: bool = False,
        is_long: bool = False,
    ) -> None:
        inline, leased = pack_tokens(output), None
        if is_long:
            content, inline = torch.frombuffer(bytearray(inline), dtype=torch.uint8), b""
            leased = await next(iter(self.hosts.values())).transport.put(content, request.request_id, timeout_s)
        decode = DecodeRequest(
            request.request_id, request.router_id, kv, inline, request.prompt.num_tokens, request.sampling,
            timeout_s, whole=whole, long_output=leased,
        )  # fmt: skip
        assert isinstance(await self.bus.request(InstanceId(name), decode, WAIT_S), Accepted)

    async def switch(self, name: str, *roles: Role, timeout_s: float = WAIT_S) -> None:
        """Give an instance these roles."""
        reply = await self.bus.request(InstanceId(name), SwitchRequest(roles, timeout_s=timeout_s), WAIT_S)
        assert isinstance(reply, SwitchReply)

    async def hand_over(self, name: str, num_tokens: int | None = None) -> None:
        assert isinstance(await self.bus.request(InstanceId(name), HandOverRequest(num_tokens), WAIT_S), Accepted)

    async def handed_over(self, request_id: str) -> None:
        await until(lambda: self.stream(request_id).kv is not None, f"{request_id} is handed over")

    async def release(self, request_id: str) -> None:
        for name in self.hosts:
            await self.bus.publish(name, ReleaseRequest(RequestId(request_id)))

    def stream(self, request_id: str, router_id: InstanceId = ROUTER) -> Stream:
        """What was streamed, checked for order and gaps."""
        stream = Stream()
        for event in self.bus.events[stream_subject(router_id)]:
            assert isinstance(event, TokenBatch)
            for chunk in event.chunks:
                if chunk.request_id != request_id:
                    continue
                assert stream.last is None, f"{chunk} after the last chunk"
                assert chunk.seq == len(stream.token_ids) + 1, f"{chunk} after {len(stream.token_ids)} tokens"
                stream.token_ids += chunk.token_ids
                stream.kv = chunk.kv
                stream.num_moves += chunk.kv is not None
                stream.last = chunk if chunk.is_last and chunk.kv is None else None
                stream.num_signs += not chunk.token_ids and not chunk.is_last
        return stream

    async def finished(self, request_id: str) -> Stream:
        await until(lambda: self.stream(request_id).last is not None, f"{request_id} ends")
        return self.stream(request_id)

    async def generate(self, prefill: str, decode: str, request: PrefillRequest) -> list[int]:
        """All output tokens of a request, as a client would see them; raises the error that ended it."""
        reply = await self.prefill(prefill, request)
        if reply.finish_reason is not None:
            return [reply.first_token] if reply.finish_reason != "stop" else []
        await self.decode(decode, request, reply)
        stream = await self.finished(request.request_id)
        if stream.last is not None and stream.last.error is not None:
            raise from_wire(stream.last.error)
        return [reply.first_token, *stream.token_ids]


def image_info(num_tokens: int, size: int = 4, picture: str = "") -> ImageInfo:
    """picture: what it shows; the same one has the same mm_hash."""
    return ImageInfo(blake3(picture.encode()).digest(), size, size, (1, 2, 2 * num_tokens), num_tokens)


def prompt_of(token_ids: Sequence[int]) -> PromptTokens:
    return PromptTokens(len(token_ids), pack_tokens(token_ids))


def text_request(
    request_id: str,
    token_ids: Sequence[int],
    max_tokens: int = 8,
    router_id: InstanceId = ROUTER,
    timeout_s: float = WAIT_S,
    stop_token_ids: tuple[int, ...] = (),
) -> PrefillRequest:
    sampling = SamplingParams(max_tokens, stop_token_ids=stop_token_ids)
    return PrefillRequest(RequestId(request_id), router_id, prompt_of(token_ids), (), sampling, timeout_s)


def image_request(
    request_id: str, token_ids: Sequence[int], embeddings: dict[int, TensorRef], max_tokens: int = 8
) -> PrefillRequest:
    """embeddings by offset, each of a picture that was never seen before."""
    images = tuple(
        PlacedImage(image_info(ref.shape[0], picture=ref.tensor_id), offset, ref) for offset, ref in embeddings.items()
    )
    return PrefillRequest(RequestId(request_id), ROUTER, prompt_of(token_ids), images, SamplingParams(max_tokens), WAIT_S)


async def error_of(awaitable: Any) -> TriptychError:
    """The typed error that `awaitable` raises."""
    try:
        result = await awaitable
    except TriptychError as error:
        return error
    raise AssertionError(f"no error but {result}")


__all__ = ["FakeCluster", "FakeEngine", "expected_tokens"]
