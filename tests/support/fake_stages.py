"""Stages without a model for tests of the router: they answer over a bus in memory and remember what they hold.

`World` is a cluster of them with a real router in front, served over HTTP on a free port. Messages go through their wire form.
With `is_caching` they keep what they made, and tell the index, as real ones do; a picture is what its bytes, or its URL, are up
to a `#`: what follows only makes it another file.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
from fastapi import FastAPI, Request, Response
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from triptych.cache.block_keys import prompt_chain, root_key
from triptych.cache.held_parts import holder_of
from triptych.cache.index import CacheIndex, MemoryIndex
from triptych.cache.keys import file_key, mm_hash
from triptych.services.prefill.checks import image_places
from triptych.services.router.app import RouterService
from triptych.shared.bus import Bus
from triptych.shared.checkpoint import open_checkpoint
from triptych.shared.errors import CACHE_MISS, UNREACHABLE, InstanceLost, TriptychError
from triptych.shared.http_host import add_probes, gate_until_started, listening_socket, make_server, url_of
from triptych.shared.image_info import ImageInfo, PartKey
from triptych.shared.instance_info import ModelCard, Resources, StageLoad
from triptych.shared.messages import (
    Accepted,
    DecodeRequest,
    EmbeddingsReady,
    EncodeReply,
    EncodeRequest,
    Event,
    Heartbeat,
    InstanceId,
    KvRef,
    Lost,
    Message,
    PrefillReply,
    PrefillRequest,
    PreprocessReply,
    PreprocessRequest,
    ReleaseRequest,
    RequestId,
    StageTime,
    TensorId,
    TensorRef,
    TokenBatch,
    TokenChunk,
    stream_subject,
)
from triptych.shared.registry import Registry
from triptych.shared.sampling_params import SamplingParams, TokenLogprobs
from triptych.shared.service import ServiceContext
from triptych.shared.settings import Settings
from triptych.shared.token_bytes import BYTES_PER_TOKEN
from triptych.shared.wire import (
    REQUEST_HEADER,
    decode_event,
    decode_reply,
    decode_request,
    encode,
    error_reply,
    request_of_header,
)

WAIT_S = 15.0
MODEL = "toy"
IMAGE_TOKENS = 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "Please describe what there is to see in it, in one sentence. "  # more tokens than a block of 4
ANSWER = "A red square beside a blüe circle 🎉."

Handler = Callable[[Any], Awaitable[Message | None]]


def picture(name: str) -> dict[str, Any]:
    """A part of a message: the picture of that name, sent along."""
    content = base64.b64encode(f"picture {name}".encode()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


def words(text: str = TEXT) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "text", "text": text}


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that other tasks make true."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {WAIT_S} s: {what}"
        await asyncio.sleep(0.002)


def write_toy_checkpoint(folder: Path, template: str = TEMPLATE, max_position_embeddings: int = 20_000) -> Path:
    """What the router reads of a checkpoint: a byte-level tokenizer and a template in Qwen's form, no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(["a red square and a blue circle", "user assistant system"], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(template)
    config = {
        "model_type": "qwen2_5_vl",
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "text_config": {"max_position_embeddings": max_position_embeddings},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
    processor = {
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 784,
        "max_pixels": 78400,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


class MemoryBus:
    """`Bus` without NATS: one for the whole world."""

    def __init__(self) -> None:
        self.handlers: dict[InstanceId, Handler] = {}
        self.listeners: dict[str, list[Callable[[Event], None]]] = defaultdict(list)

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Any:
        handler = self.handlers.get(instance_id)
        if handler is None:
            raise InstanceLost("an instance of a stage is gone", instance_id=instance_id, code=UNREACHABLE)
        reply = await handler(decode_request(encode(message)))
        assert reply is not None
        return decode_reply(encode(reply))

    async def publish(self, instance_id: InstanceId, message: Message) -> None:
        if instance_id in self.handlers:
            await self.handlers[instance_id](decode_request(encode(message)))

    async def publish_event(self, subject: str, event: Event) -> None:
        for listener in self.listeners[subject]:
            listener(decode_event(encode(event)))

    async def listen(self, subject: str, handler: Callable[[Event], None]) -> None:
        self.listeners[subject].append(handler)

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        """It is never away."""


class FakeStage:
    """One instance with any of the four stages. `hooks` replace what it does with a message; `held` is what it holds per
    request until it is released; `seen` is what it was asked, `told` which pictures landed."""

    def __init__(self, world: World, name: str, stages: Sequence[str], num_blocks: int) -> None:
        self.world = world
        self.instance_id = InstanceId(f"{name}-abcd")
        self.name = name
        self.stages = tuple(stages)
        self.num_blocks = num_blocks
        self.loads: tuple[StageLoad, ...] = ()
        self.hooks: dict[type, Handler] = {}
        self.held: dict[RequestId, int] = defaultdict(int)
        self.released: list[RequestId] = []
        self.seen: list[Any] = []
        self.media: dict[str, bytes] = {}
        self.uploads: dict[RequestId, set[asyncio.Task[Response]]] = defaultdict(set)
        self.told: list[EmbeddingsReady] = []
        self.embeddings: set[PartKey] = set()
        self.kv: set[bytes] = set()
        self.takes_follow_ups = False
        self.group = ""
        self.tasks: set[asyncio.Task[None]] = set()

    def beat(self, url: str = "") -> None:
        is_preprocess = "preprocess" in self.stages
        beat = Heartbeat(
            instance_id=self.instance_id,
            name=self.name,
            service="preprocess" if is_preprocess else "instance",
            state="ready",
            roles=cast(Any, tuple(stage for stage in self.stages if stage != "preprocess")),
            http_url=url or f"{self.world.upload_url}/{self.instance_id}",
            interval_s=0.5,
            host="here",
            loads=self.loads,
            resources=Resources(pid=1, num_threads=1, num_blocks=self.num_blocks, num_free_blocks=self.num_blocks),
            model=ModelCard(MODEL, self.world.revision, self.world.max_model_len),
            takes_follow_ups=self.takes_follow_ups,
            group=self.group,
        )
        self.world.registry.on_event(beat, time.monotonic())

    def die(self, tell: bool = True) -> None:
        """Stop answering; the registry hears of it when `tell`."""
        self.world.bus.handlers.pop(self.instance_id, None)
        self.world.stages.pop(self.instance_id, None)
        self.beat(self.world.nobodys_url)
        for task in self.tasks:
            task.cancel()
        if tell:
            self.world.registry.on_event(Lost(self.instance_id, self.name, 9, expected=False), time.monotonic())

    async def handle(self, request: Any) -> Message | None:
        if isinstance(request, ReleaseRequest):
            self.held.pop(request.request_id, None)
            self.released.append(request.request_id)
            for upload in self.uploads.pop(request.request_id, ()):
                upload.cancel()
            return None
        if isinstance(request, EmbeddingsReady):
            self.told.append(request)
            return Accepted()
        if isinstance(request, DecodeRequest) and request.long_output is not None:
            request = msgspec.structs.replace(request, output=self.world.blobs[-1])
        self.seen.append(request)
        self.held[request.request_id] += 1
        hook = self.hooks.get(type(request), self.default)
        try:
            return await hook(request)
        except TriptychError:
            if request.request_id not in self.released and self.held.get(request.request_id) == 1:
                self.held.pop(request.request_id)
            raise

    async def answer(self, request: PreprocessRequest) -> Response:
        """Over HTTP."""
        try:
            reply = await self.handle(request)
        except TriptychError as error:
            return Response(encode(error_reply(error)), error.status)
        assert reply is not None
        return Response(encode(reply))

    def ref(self, what: str, num_bytes: int = 64) -> TensorRef:
        self.world.num_tensors += 1
        return TensorRef(TensorId(f"{what}-{self.world.num_tensors}"), self.instance_id, (num_bytes,), "uint8", num_bytes, 60)

    async def default(self, request: Any) -> Message:
        match request:
            case PreprocessRequest():
                return self.preprocess(request)
            case EncodeRequest():
                return self.encode(request)
            case PrefillRequest():
                num_cached = await self.compute(request)
                left = self.world.answer_ids[request.num_output_tokens :]
                if not left:
                    return PrefillReply(0, self.time("prefill"), "stop", num_cached_tokens=num_cached)
                first = left[0]
                [logprobs] = logprobs_of(request.sampling, first) or (None,)
                return msgspec.structs.replace(self.prefilled(first), logprobs=logprobs, num_cached_tokens=num_cached)
            case DecodeRequest():
                self.spawn(self.stream(request, self.world.answer_ids[len(request.output) // BYTES_PER_TOKEN :]))
                return Accepted()
            case _:
                raise AssertionError(f"unexpected {request}")

    def landed(self) -> set[tuple[RequestId, int]]:
        """The pictures, by request and index, that prefill was told of."""
        return {(ready.request_id, ready.index) for ready in self.told}

    def preprocess(self, request: PreprocessRequest) -> PreprocessReply:
        content = self.media.get(request.media_id or "") or request.content or str(request.url).encode()
        if request.may_skip_decode and (known := self.world.known.get(content)) is not None:
            media_id = f"kept-{len(self.media)}"
            self.media[media_id] = content
            return PreprocessReply(known, None, self.time("preprocess"), media_id)
        options_key = self.world.checkpoint.image.within(request.limits).key()
        names = {"model_revision": self.world.revision, "options_key": options_key}
        shown = content.partition(b"#")[0]
        pixels = (shown * 3)[: len(shown) // 3 * 9]
        digest = mm_hash([pixels], (1, len(pixels) // 3), tenant_salt=request.cache_salt, **names)
        image = ImageInfo(digest, 56, 56, (1, 4, 4), IMAGE_TOKENS)
        if self.world.is_caching:
            self.world.index.remember(file_key(content, cache_salt=request.cache_salt, **names), image)
        return PreprocessReply(image, self.ref("pixels"), self.time("preprocess"))

    def encode(self, request: EncodeRequest) -> EncodeReply:
        key = request.image.key
        is_cached = key in self.embeddings
        if request.pixels is None and not is_cached:
            raise InstanceLost("not held", code=CACHE_MISS)
        if self.world.is_caching:
            self.embeddings.add(key)
            self.world.index.hold(holder_of(self.instance_id, key), "embeddings", [request.image.mm_hash])
        return EncodeReply(self.ref("embeddings"), self.time("encoder"), is_cached)

    async def compute(self, request: PrefillRequest) -> int:
        """How many tokens were cached, after all embeddings have come that are needed."""
        token_ids = memoryview(request.prompt.inline).cast("I").tolist()
        block_size = self.world.settings.block_size
        root = root_key(self.world.revision, block_size, request.cache_salt)
        keys = prompt_chain(token_ids, image_places(request.images), block_size, root).keys
        held = self.kv | (self.world.stages[request.prefix.instance_id].kv if request.prefix else set())
        usable = keys[: max(0, len(token_ids) - 1) // block_size]
        num_cached = block_size * len(list(takewhile(held.__contains__, usable)))
        for index, placed in enumerate(request.images):
            if placed.is_awaited:
                await until(lambda i=index: (request.request_id, i) in self.landed(), "embeddings land")
            elif placed.embeddings is None and placed.offset + placed.image.num_tokens > num_cached:
                raise InstanceLost("not cached", code=CACHE_MISS)
        if self.world.is_caching:
            self.kv.update(keys)
            self.world.index.hold(self.instance_id, "kv", keys)
        return num_cached

    def prefilled(self, first_token: int) -> PrefillReply:
        kv = KvRef(self.ref("kv"), 16, 16, 0, "layout")
        return PrefillReply(first_token, self.time("prefill"), kv=kv)

    def time(self, stage: str) -> StageTime:
        return StageTime(stage, self.instance_id, 0.001, 0.002, 0.003)

    def spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def send(self, request: DecodeRequest, seq: int, token_ids: Sequence[int] = (), **fields: Any) -> None:
        chunk = TokenChunk(request.request_id, seq, tuple(token_ids), **fields)
        await self.world.bus.publish_event(stream_subject(request.router_id), TokenBatch(self.instance_id, (chunk,)))

    async def stream(self, request: DecodeRequest, token_ids: Sequence[int], end: bool = True) -> None:
        """Tokens one by one, after those that the request has, then the end."""
        first = len(request.output) // BYTES_PER_TOKEN
        limit = request.sampling.max_tokens - first
        for seq, token_id in enumerate(token_ids[:limit], start=first):
            await self.send(request, seq, [token_id], logprobs=logprobs_of(request.sampling, token_id))
            await asyncio.sleep(0)
        if end:
            reason: Any = "length" if len(token_ids) > limit else "stop"
            count = min(len(token_ids), limit)
            await self.send(request, first + count, finish_reason=reason, time=self.time("decode"))

    async def hand_over(self, request: DecodeRequest, token_ids: Sequence[int]) -> None:
        """These tokens, then another instance goes on."""
        await self.stream(request, token_ids, end=False)
        num_tokens = len(request.output) // BYTES_PER_TOKEN + len(token_ids)
        kv = KvRef(self.ref("kv"), request.num_prompt_tokens + num_tokens - 1, 16, 0, "layout")
        await self.send(request, num_tokens, kv=kv, time=self.time("decode"))


def logprobs_of(sampling: SamplingParams, token_id: int) -> tuple[TokenLogprobs, ...]:
    """Of one token, if asked for: its own is minus its id, and the top ones are token 0, 1, 2, ..."""
    if sampling.num_logprobs is None:
        return ()
    return (TokenLogprobs(-float(token_id), tuple((i, -0.5 * i) for i in range(sampling.num_logprobs))),)


class World:
    """`async with World(folder) as world`: a router over HTTP at world.url, and whatever stages the test adds. known: pictures
    that preprocess knows by their bytes, or URL."""

    def __init__(self, checkpoint: Path, max_model_len: int = 20_000, index: CacheIndex | None = None, **settings: Any) -> None:
        self.settings = Settings(model=str(checkpoint), model_name=MODEL, **settings)
        self.max_model_len = max_model_len
        self.bus = MemoryBus()
        self.registry = Registry(heartbeat_timeout_s=1e9)
        self.stages: dict[InstanceId, FakeStage] = {}
        self.all_stages: list[FakeStage] = []
        self.num_tensors = 0
        self.index = index or MemoryIndex()
        self.is_caching = False
        self.known: dict[bytes, ImageInfo] = {}
        self.checkpoint = open_checkpoint(str(checkpoint), MODEL)
        self.num_media = 0
        self.blobs: list[bytes] = []
        self.revision = ""
        self.router = RouterService(self.settings, self.index)
        self.tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self.answer_ids: list[int] = self.tokenizer.encode(ANSWER, add_special_tokens=False).ids

    async def __aenter__(self) -> World:
        self._listeners = [listening_socket("127.0.0.1", 0) for _ in range(2)]
        self.url, self.upload_url = map(url_of, self._listeners)
        with closing(listening_socket("127.0.0.1", 0)) as listener:
            self.nobodys_url = url_of(listener)
        self.context = ServiceContext(
            self.settings, InstanceId("router-0-abcd"), "router-0", cast(Bus, self.bus), self.registry, self.url, "127.0.0.1"
        )
        add_probes(self.router.app, lambda: self.context.lifecycle.state, "router-0-abcd", self.context.metrics)
        gated = gate_until_started(self.router.app, lambda: self.context.lifecycle.state)
        self._servers = [make_server(gated), make_server(self._upload_app())]
        pairs = zip(self._servers, self._listeners, strict=True)
        self._serving = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in pairs]
        await self.router.start(self.context)
        card = self.router.report().model
        assert card is not None
        self.revision = card.revision
        self.context.lifecycle.state = "ready"
        await until(lambda: all(server.started for server in self._servers), "servers")
        self.http = httpx.AsyncClient(base_url=self.url, timeout=WAIT_S, trust_env=False)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.http.aclose()
        for server in self._servers:
            server.should_exit = True
        await asyncio.wait(self._serving, timeout=WAIT_S)
        await self.router.stop()
        for listener in self._listeners:
            listener.close()
        for stage in self.all_stages:
            for task in set(stage.tasks):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def add(self, name: str, *stages: str, num_blocks: int = 1000) -> FakeStage:
        """A new instance, there at once."""
        stage = FakeStage(self, name, stages, num_blocks)
        self.stages[stage.instance_id] = stage
        self.all_stages.append(stage)
        self.bus.handlers[stage.instance_id] = stage.handle
        stage.beat()
        return stage

    def add_all(self) -> dict[str, FakeStage]:
        """One instance of each stage."""
        return {stage: self.add(f"{stage}-0", stage) for stage in ("preprocess", "encoder", "prefill", "decode")}

    def _upload_app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/{instance_id}/media")
        async def media(instance_id: InstanceId, http: Request) -> Response:
            self.num_media += 1
            stage, media_id = self.stages[instance_id], f"m{self.num_media}"
            stage.media[media_id] = await http.body()
            request: Any = request_of_header(http.headers[REQUEST_HEADER])
            work = asyncio.create_task(stage.answer(msgspec.structs.replace(request, media_id=media_id)))
            stage.uploads[request.request_id].add(work)
            await asyncio.wait([work])
            return Response(status_code=503) if work.cancelled() else work.result()

        @app.post("/{instance_id}/blobs")
        async def blobs(instance_id: InstanceId, http: Request) -> Response:
            self.blobs.append(await http.body())
            return Response(msgspec.msgpack.encode(self.stages[instance_id].ref("blob", len(self.blobs[-1]))))

        return app

    async def ask(self, content: Any = "hello", **fields: Any) -> httpx.Response:
        """One chat completion. fields go into the body; `headers` beside it."""
        headers = fields.pop("headers", {})
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def settled(self) -> None:
        """Everything that the router and the living stages kept for requests is gone, or this fails."""

        def left() -> list[str]:
            running = self.router._running
            assert running is not None
            parts = running.parts
            kept = {
                "inflight": len(self.router._inflight),
                "releases": int(not running.releases.is_idle),
                "body bytes": running.edge.bodies.num_bytes,
                "streams": len(parts.streams),
                "waiting": len(parts.dispatcher),
                "book": len(parts.book),
                **{stage.name: len(stage.held) for stage in self.stages.values()},
            }
            return [f"{name}: {count}" for name, count in kept.items() if count]

        try:
            await until(lambda: not left(), "everything released")
        except AssertionError:
            raise AssertionError(f"still held: {left()}") from None


def events(body: str) -> list[Any]:
    """The parsed events of a stream; "[DONE]" stays a string. Fails on anything that isn't `data: ...` and an empty line."""
    assert body.endswith("\n\n"), body[-200:]
    found = []
    for block in body[:-2].split("\n\n"):
        assert block.startswith("data: ")
        assert "\n" not in block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def text_of(found: Sequence[Any]) -> str:
    return "".join(c["delta"].get("content", "") for e in found if e != "[DONE]" for c in e.get("choices", []))
