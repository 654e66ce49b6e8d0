"""The preprocess service on a real bus: pictures in by upload and by URL, pixels out by the transport, and nothing left over
however a request ends.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from aiohttp import web
from PIL import Image

from support.bare_checkpoint import write_bare_checkpoint
from support.nats_server import NatsServer
from support.odd_pictures import ODD, file, noise
from triptych.cache.index import CacheIndex, MemoryIndex
from triptych.services.preprocess.app import PreprocessService
from triptych.services.preprocess.decode import DecodeOptions, decode_image
from triptych.shared.bus import Bus
from triptych.shared.checkpoint import open_checkpoint
from triptych.shared.errors import BadRequest, DeadlineExceeded, InstanceLost, Overloaded, from_wire
from triptych.shared.http_host import listening_socket, url_of
from triptych.shared.image_info import PixelLimits
from triptych.shared.messages import (
    LOST_SUBJECT,
    DrainRequest,
    ErrorReply,
    Event,
    Heartbeat,
    InstanceId,
    Lost,
    PreprocessReply,
    PreprocessRequest,
    ReleaseRequest,
    Reply,
    RequestId,
    TensorRef,
)
from triptych.shared.process_memory import family_pss_bytes, pss_bytes
from triptych.shared.registry import Registry
from triptych.shared.service import ServiceContext, ServiceHost
from triptych.shared.settings import Settings
from triptych.shared.transport.transport import InstanceTransport
from triptych.shared.wire import REQUEST_HEADER, decode_reply, header_of

ROUTER = InstanceId("router-0-aaaaaaaa")
PARAM = "messages.[0].content.[1].image_url"
R1, R2 = RequestId("r1"), RequestId("r2")


def _png(seed: int = 0, size: tuple[int, int] = (100, 60)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _jpeg(size: tuple[int, int]) -> bytes:
    return file(noise(*size), "JPEG")


def _request(request_id: RequestId = R1, **more: Any) -> PreprocessRequest:
    return PreprocessRequest(request_id, ROUTER, PARAM, **({"timeout_s": 20.0} | more))


def _headers(request_id: RequestId = R1, **more: Any) -> dict[str, str]:
    """For either kind of upload."""
    return {"X-Request-Id": request_id, "X-Router-Id": ROUTER, REQUEST_HEADER: header_of(_request(request_id, **more))}


@dataclass(slots=True)
class Preprocess:
    """A running service and what a router and an encoder would do with it."""

    service: PreprocessService
    context: ServiceContext
    bus: Bus
    transport: InstanceTransport
    http: httpx.AsyncClient
    exited: asyncio.Task[int]

    async def ask(self, request_id: RequestId = R1, **more: Any) -> PreprocessReply:
        """more: url or media_id, limits, and so on."""
        reply = await self.bus.request(self.context.instance_id, _request(request_id, **more), 30)
        assert isinstance(reply, PreprocessReply)
        return reply

    async def upload(self, data: bytes, request_id: RequestId = R1, **more: Any) -> PreprocessReply:
        """`ask` with the picture along."""
        status, reply = await self.post("/media", data, request_id, **more)
        if isinstance(reply, ErrorReply):
            raise from_wire(reply.error)
        assert (status, type(reply)) == (200, PreprocessReply)
        return reply

    async def post(self, path: str, body: Any, request_id: RequestId = R1, **more: Any) -> tuple[int, Any]:
        """Status and answer."""
        answer = await self.http.post(path, content=body, headers=_headers(request_id, **more))
        is_blob = path == "/blobs" and answer.is_success
        return answer.status_code, msgspec.msgpack.decode(answer.content, type=TensorRef if is_blob else Reply)

    async def keep(self, request_id: RequestId = R1) -> str:
        """Leave `_png()`, which is known, to be decoded later."""
        reply = await self.upload(_png(), request_id, may_skip_decode=True)
        assert reply.media_id is not None
        return reply.media_id

    async def pull(self, ref: TensorRef) -> torch.Tensor:
        return await self.transport.pull(ref, self.service.report().transport, 10)

    def counted(self) -> dict[str, float]:
        """Pictures decoded, and only identified."""
        value = self.context.metrics.get_sample_value
        return {name: value(f"triptych_pictures_{name}_total") or 0 for name in ("decoded", "identified")}

    async def release(self, request_id: RequestId) -> None:
        await self.bus.publish(self.context.instance_id, ReleaseRequest(request_id))

    def left_over(self) -> tuple[int, int, int, int, int]:
        report = self.service.report()
        assert report.resources is not None
        [load] = report.loads
        used = report.resources
        return load.num_waiting, load.num_running, used.num_leases, used.tensor_store_bytes, used.media_store_bytes

    async def until(self, condition: Callable[[], object], what: str) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - looks from outside, through the service's own report
                await asyncio.sleep(0.005)

    async def until_empty(self) -> None:
        await self.until(lambda: self.left_over() == (0, 0, 0, 0, 0) and self.service.is_idle(), "an empty service")


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"), max_payload_bytes=64 * 1024)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bare_checkpoint(tmp_path_factory.mktemp("checkpoints") / "bare")


Start = Callable[..., Awaitable[Preprocess]]


@pytest.fixture
async def start(nats_server: NatsServer, checkpoint: Path) -> AsyncIterator[Start]:
    """start(index=..., **settings) -> a running Preprocess, of which there may be two (with another name)."""
    async with AsyncExitStack() as stack:

        async def begin(**overrides: object) -> Preprocess:
            index = overrides.pop("index", None)
            settings = Settings(model=str(checkpoint), nats_url=nats_server.url, **({"heartbeat_interval_s": 0.1} | overrides))
            return await stack.enter_async_context(_running(settings, index))

        yield begin


@asynccontextmanager
async def _running(settings: Settings, index: CacheIndex | None) -> AsyncIterator[Preprocess]:
    instance_id, encoder_id = InstanceId(f"{settings.name or 'preprocess-0'}-bbbbbbbb"), InstanceId("encoder-0-cccccccc")
    service = PreprocessService(settings, index)
    bus, client_bus = await Bus.connect(settings.nats_url, instance_id), await Bus.connect(settings.nats_url, encoder_id)
    with closing(listening_socket("127.0.0.1", 0)) as listener:
        registry = Registry(settings.heartbeat_timeout_s)
        context = ServiceContext(settings, instance_id, "preprocess-0", bus, registry, url_of(listener), "127.0.0.1")
        exited = asyncio.create_task(ServiceHost(context, service).run(listener))
        transport = InstanceTransport(encoder_id, client_bus, "127.0.0.1", 1 << 20, mode=settings.transport)
        await transport.start()
        async with httpx.AsyncClient(base_url=context.http_url, trust_env=False, timeout=60) as http:
            running = Preprocess(service, context, client_bus, transport, http, exited)
            await running.until(lambda: context.lifecycle.state == "ready", "ready")
            try:
                yield running
            finally:
                context.lifecycle.begin_drain(exit=True)
                service.on_router_lost(ROUTER)
                assert await asyncio.wait_for(exited, 20) == 0
                await transport.close()
                await client_bus.close()
                await bus.close()


@pytest.fixture
async def hanging_url() -> AsyncIterator[str]:
    """A picture that never comes."""
    go_on = asyncio.Event()

    async def hang(request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.wait_for(go_on.wait(), 60)
        return web.Response()

    async with _site(hang) as url:
        yield url
        go_on.set()


@asynccontextmanager
async def _site(handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/a.png"
    await runner.cleanup()


# --- what comes out ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["shared_memory", "gloo"])
async def test_uploaded_picture_becomes_pixels_and_identity(start: Start, checkpoint: Path, mode: str) -> None:
    preprocess = await start(transport=mode)
    opened = open_checkpoint(str(checkpoint))
    info, image = decode_image(_png(), DecodeOptions(opened.image, opened.revision, 1_000_000), PARAM)
    reply = await preprocess.upload(_png())
    assert reply.image == info
    assert reply.pixels.shape == (info.height, info.width, 3)
    assert torch.equal(await preprocess.pull(reply.pixels), torch.from_numpy(np.array(image)))
    assert (reply.time.stage, reply.time.instance_id) == ("preprocess", preprocess.context.instance_id)
    assert reply.time.compute_s > 0
    await preprocess.until_empty()


async def test_pixel_limits_reach_pixels_tokens_and_identity(start: Start) -> None:
    preprocess = await start()
    picture = _png(size=(400, 300))
    plain = await preprocess.upload(picture)
    small = await preprocess.upload(picture, R2, limits=PixelLimits(max_pixels=112 * 84))
    assert (small.image.width, small.image.height, small.image.num_tokens) == (112, 84, 12)
    assert small.pixels.shape == (84, 112, 3)
    assert small.image.num_tokens < plain.image.num_tokens
    assert small.image.mm_hash != plain.image.mm_hash
    beyond = await preprocess.upload(picture, R2, limits=PixelLimits(1, 1 << 30))
    assert beyond.image == plain.image


async def test_url_is_downloaded(start: Start) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=_png())

    preprocess = await start(allow_private_media=True)
    uploaded = await preprocess.upload(_png())
    async with _site(handler) as url:
        downloaded = await preprocess.ask(R2, url=url)
    assert downloaded.image == uploaded.image
    assert downloaded.time.transfer_s > 0


# --- what is known already ----------------------------------------------------------------------------------------------------


async def test_a_known_file_is_not_decoded_until_its_pixels_are_wanted(start: Start) -> None:
    preprocess = await start()
    first = await preprocess.upload(_png(), may_skip_decode=True)
    assert first.pixels is not None
    assert first.media_id is None
    known = await preprocess.upload(_png(), R2, may_skip_decode=True)
    assert (known.image, known.pixels) == (first.image, None)
    assert preprocess.counted() == {"decoded": 1, "identified": 1}
    wanted = await preprocess.ask(R2, media_id=known.media_id)
    assert wanted.image == first.image
    assert torch.equal(await preprocess.pull(wanted.pixels), await preprocess.pull(first.pixels))
    assert preprocess.counted() == {"decoded": 2, "identified": 1}
    await preprocess.until_empty()


async def test_without_a_cache_no_file_is_remembered(start: Start) -> None:
    index = MemoryIndex()
    preprocess = await start(index=index, policy="static")
    for request_id in (R1, R2):
        await preprocess.upload(_png(), request_id, may_skip_decode=True)
        await preprocess.release(request_id)
    assert preprocess.counted() == {"decoded": 2, "identified": 0}
    assert not index._images
    await preprocess.until_empty()


async def test_another_process_told_the_index(start: Start) -> None:
    index = MemoryIndex()
    first = await (await start(index=index)).upload(_png())
    preprocess = await start(index=index, name="preprocess-1")
    known = await preprocess.upload(_png(), R2, may_skip_decode=True)
    assert (known.image, known.pixels) == (first.image, None)
    assert preprocess.counted() == {"decoded": 0, "identified": 1}


async def test_what_was_only_identified_goes_with_its_request(start: Start) -> None:
    preprocess = await start()
    await preprocess.pull((await preprocess.upload(_png())).pixels)
    known = await preprocess.upload(_png(), R2, may_skip_decode=True)
    assert preprocess.left_over()[-1] == len(_png())
    await preprocess.release(R2)
    await preprocess.until_empty()
    with pytest.raises(InstanceLost):
        await preprocess.ask(RequestId("r3"), media_id=known.media_id)


async def test_tenants_do_not_share_what_is_known(start: Start) -> None:
    preprocess = await start()
    replies = [
        await preprocess.upload(_png(), RequestId(f"r{i}"), may_skip_decode=True, cache_salt=salt)
        for i, salt in enumerate((b"", b"a", b"b", b"a"))
    ]
    assert [reply.pixels is None for reply in replies] == [False, False, False, True]
    assert len({reply.image.mm_hash for reply in replies}) == 3


async def test_a_known_file_seen_at_another_size_is_another_picture(start: Start) -> None:
    preprocess = await start()
    picture = _png(size=(400, 300))
    await preprocess.upload(picture, may_skip_decode=True)
    small = await preprocess.upload(picture, R2, may_skip_decode=True, limits=PixelLimits(max_pixels=112 * 84))
    assert small.pixels is not None


async def test_many_pictures_at_once(start: Start) -> None:
    preprocess = await start()
    ids = [RequestId(f"r{index}") for index in range(40)]
    pictures = [_png(index, (30 + index, 200 - 3 * index)) for index in range(40)]
    replies = await asyncio.gather(*(preprocess.upload(*pair) for pair in zip(pictures, ids, strict=True)))
    assert len({reply.image.mm_hash for reply in replies}) == 40
    pulled = await asyncio.gather(*(preprocess.pull(reply.pixels) for reply in replies))
    assert [tuple(pixels.shape) for pixels in pulled] == [reply.pixels.shape for reply in replies]
    await preprocess.until_empty()


async def test_many_large_pictures_do_not_hold_up_the_loop(start: Start) -> None:
    """64 at once; the service answers /live meanwhile, nine times of ten within 100 ms on a machine with other work."""
    preprocess = await start()
    picture = _jpeg((1600, 1200))
    decoding = asyncio.gather(*(preprocess.upload(picture, RequestId(f"r{index}")) for index in range(64)))
    took_s: list[float] = []
    while not decoding.done():
        begun_at_s = time.monotonic()
        assert (await preprocess.http.get("/live")).status_code == 200
        took_s.append(time.monotonic() - begun_at_s)
        await asyncio.wait([decoding], timeout=0.01)
    assert len({reply.image for reply in await decoding}) == 1
    assert len(took_s) > 10
    assert statistics.quantiles(took_s, n=10)[-1] < 0.1, sorted(took_s)[-10:]


async def test_killed_workers_cost_nobody_a_picture(start: Start) -> None:
    preprocess = await start(decode_workers=2)
    pool = preprocess.service._pool
    picture = _jpeg((800, 600))
    tasks = [asyncio.create_task(preprocess.upload(picture, RequestId(f"r{index}"))) for index in range(40)]
    victims = set(pool.pids)  # each once: a picture has two tries
    assert len(victims) == 2
    for num_done, pid in zip((5, 15), victims, strict=True):
        await preprocess.until(lambda n=num_done: sum(task.done() for task in tasks) >= n, "some pictures")
        os.kill(pid, signal.SIGKILL)
    replies = await asyncio.gather(*tasks)
    assert len({reply.image for reply in replies}) == 1
    assert not victims & set(pool.pids)
    assert family_pss_bytes() >= pss_bytes(os.getpid()) + sum(map(pss_bytes, pool.pids)) * 0.9
    await asyncio.gather(*(preprocess.pull(reply.pixels) for reply in replies))
    await preprocess.until_empty()


async def test_odd_pictures_are_their_plain_equivalents(start: Start) -> None:
    """What the unit tests say of all of them holds through the whole service."""
    preprocess = await start()
    for name in ("PNG orientation 6", "rgba", "grey 16 bits ramp", "cmyk jpeg", "animated WEBP"):
        encoded, plain = ODD[name]
        odd, upright = await preprocess.upload(encoded), await preprocess.upload(file(plain), R2)
        assert odd.image == upright.image, name
        assert torch.equal(await preprocess.pull(odd.pixels), await preprocess.pull(upright.pixels)), name


async def test_long_prompt_is_leased_as_bytes(start: Start) -> None:
    preprocess = await start()
    blob = np.arange(20_000, dtype="<u4").tobytes()
    status, ref = await preprocess.post("/blobs", blob)
    assert status == 200
    assert (ref.shape, ref.dtype, ref.num_bytes) == ((80_000,), "uint8", 80_000)
    pulled = await preprocess.pull(ref)
    assert pulled.numpy().tobytes() == blob
    await preprocess.until_empty()


async def test_heartbeat_tells_what_is_held(start: Start) -> None:
    preprocess = await start()
    beats: list[Heartbeat] = []

    def on_event(event: Event) -> None:
        if isinstance(event, Heartbeat):
            beats.append(event)

    await preprocess.bus.listen("triptych.v1.heartbeat", on_event)
    reply = await preprocess.upload(_png())
    await preprocess.keep(R2)
    await preprocess.until(lambda: beats and beats[-1].resources.num_leases == 1, "a heartbeat with a lease")
    beat = beats[-1]
    assert beat.resources.tensor_store_bytes >= reply.pixels.num_bytes
    assert beat.resources.media_store_bytes == len(_png())
    assert (beat.loads[0].stage, beat.loads[0].num_waiting) == ("preprocess", 1)
    assert beat.model is not None
    assert (beat.model.name, beat.model.max_model_len) == ("bare", 512)


# --- refusals ---------------------------------------------------------------------------------------------------------------


async def test_broken_picture_is_the_clients_fault_and_harms_nobody(start: Start) -> None:
    preprocess = await start()
    bad, good = await asyncio.gather(
        preprocess.upload(_png()[:-200], R1), preprocess.upload(_png(), R2), return_exceptions=True
    )
    assert isinstance(bad, BadRequest)
    assert (bad.code, bad.status, bad.param) == ("invalid_image", 400, PARAM)
    assert isinstance(good, PreprocessReply)


async def test_private_url_is_refused_by_default(start: Start, hanging_url: str) -> None:
    preprocess = await start()
    with pytest.raises(BadRequest) as caught:
        await preprocess.ask(url=hanging_url)
    assert (caught.value.code, caught.value.param) == ("image_download_failed", PARAM)
    await preprocess.until_empty()


async def test_unknown_upload_must_be_sent_again(start: Start) -> None:
    preprocess = await start()
    await preprocess.upload(_png())
    media_id = await preprocess.keep()
    for request_id, asked in ((R1, "0" * 32), (R2, media_id)):
        with pytest.raises(InstanceLost) as caught:
            await preprocess.ask(request_id, media_id=asked)
        assert caught.value.code == "media_lost"


async def test_a_small_file_comes_in_the_message(start: Start) -> None:
    preprocess, picture = await start(max_media_bytes=2000), _png(size=(8, 8))
    reply = await preprocess.ask(content=picture)
    assert reply.image == (await preprocess.upload(picture, R2)).image
    known = await preprocess.ask(RequestId("r3"), content=picture, may_skip_decode=True)
    assert (known.image, known.pixels) == (reply.image, None)
    with pytest.raises(BadRequest) as caught:
        await preprocess.ask(RequestId("r4"), content=bytes(2001))
    assert caught.value.code == "image_too_large"
    for request_id in (R1, R2, RequestId("r3")):
        await preprocess.release(request_id)
    await preprocess.until_empty()


async def test_request_without_a_source(start: Start) -> None:
    preprocess = await start()
    with pytest.raises(BadRequest):
        await preprocess.ask()


@pytest.mark.parametrize("path", ["/media", "/blobs"])
async def test_upload_bounds(start: Start, path: str) -> None:
    preprocess = await start(max_media_bytes=2000, media_store_bytes=1 << 16)
    picture = _png(size=(8, 8)).ljust(2000, b"\0")
    ids = [RequestId(f"r{index}") for index in range(33)]
    for request_id in ids:  # all but the first one are known, and kept
        await preprocess.upload(picture, request_id, may_skip_decode=True)
    for size, status, code in ((2001, 413, "image_too_large"), (2000, 503, "overloaded")):
        answer = await preprocess.post(path, bytes(size))
        assert (answer[0], answer[1].error.code) == (status, code)
    for request_id in ids:
        await preprocess.release(request_id)
    await preprocess.until_empty()
    assert (await preprocess.post(path, picture, RequestId("after")))[0] == 200


@pytest.mark.parametrize("path", ["/media", "/blobs"])
async def test_streamed_upload_over_the_bound_is_cut(start: Start, path: str) -> None:
    """Without a Content-Length."""
    preprocess = await start(max_media_bytes=2000)

    async def body() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(100)

    assert (await preprocess.post(path, body()))[0] == 413
    await preprocess.until_empty()


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/blobs", {}),
        ("/blobs", {"X-Request-Id": "r1"}),
        ("/blobs", {"X-Request-Id": "r 1", "X-Router-Id": "r"}),
        ("/blobs", {"X-Router-Id": "r"}),
        ("/media", {}),
        ("/media", {REQUEST_HEADER: "no base64"}),
        ("/media", {REQUEST_HEADER: "AAAA"}),
        ("/media", {REQUEST_HEADER: header_of(ReleaseRequest(R1))}),
    ],
)
async def test_uploads_need_their_headers(start: Start, path: str, headers: dict[str, str]) -> None:
    preprocess = await start()
    answer = await preprocess.http.post(path, content=b"x", headers=headers)
    reply = decode_reply(answer.content)
    assert isinstance(reply, ErrorReply)
    assert (answer.status_code, reply.error.kind) == (400, "bad_request")


async def test_empty_blob(start: Start) -> None:
    preprocess = await start()
    assert (await preprocess.post("/blobs", b""))[0] == 400


async def test_upload_that_breaks_off_leaves_nothing(start: Start) -> None:
    preprocess = await start()
    _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(preprocess.context.http_url).port)
    lines = ["POST /media HTTP/1.1", "Host: x", "Content-Length: 1000", *map(": ".join, _headers().items()), "", ""]
    writer.write("\r\n".join(lines).encode() + bytes(500))
    await preprocess.until(lambda: preprocess.left_over()[4] == 500, "half of the body")
    writer.close()
    await preprocess.until_empty()


async def test_waiting_is_bounded(start: Start, hanging_url: str) -> None:
    preprocess = await start(allow_private_media=True, max_waiting=2)
    hanging = [asyncio.create_task(preprocess.ask(RequestId(f"h{index}"), url=hanging_url)) for index in range(2)]
    await preprocess.until(lambda: preprocess.left_over()[0] == 2, "two downloads")
    with pytest.raises(Overloaded):
        await preprocess.ask(url=hanging_url)
    assert (await preprocess.post("/media", _png()))[0] == 503
    for index, task in enumerate(hanging):
        await preprocess.release(RequestId(f"h{index}"))
        with pytest.raises(InstanceLost):
            await task
    await preprocess.until_empty()


# --- ends -------------------------------------------------------------------------------------------------------------------


async def test_release_frees_everything_of_its_request_only(start: Start, hanging_url: str) -> None:
    preprocess = await start(allow_private_media=True)
    await preprocess.upload(_png())
    await preprocess.keep()
    await preprocess.post("/blobs", bytes(100))
    running = asyncio.create_task(preprocess.ask(url=hanging_url))
    other = await preprocess.upload(_png(), R2)
    await preprocess.until(lambda: preprocess.left_over()[:3] == (2, 0, 3), "an upload, a download and three leases")
    await preprocess.release(R1)
    with pytest.raises(InstanceLost) as caught:
        await running
    assert caught.value.code == "request_released"
    await preprocess.until(lambda: preprocess.left_over()[:3] == (0, 0, 1), "only the other's lease")
    await preprocess.pull(other.pixels)
    await preprocess.until_empty()


async def test_release_that_overtakes_its_request(start: Start) -> None:
    preprocess = await start()
    await preprocess.release(R1)
    await preprocess.upload(_png(), R2)  # a round trip, after which the release is read
    with pytest.raises(InstanceLost):
        await preprocess.ask(url="http://127.0.0.1/")
    assert (await preprocess.post("/media", _png()))[0] == 503


async def test_lost_router_frees_everything_it_held(start: Start, hanging_url: str) -> None:
    preprocess = await start(allow_private_media=True)
    await preprocess.upload(_png())
    await preprocess.keep(R2)
    running = asyncio.create_task(preprocess.ask(RequestId("r3"), url=hanging_url))
    await preprocess.until(lambda: preprocess.left_over()[:3] == (2, 0, 1), "an upload, a download and a lease")
    await preprocess.bus.publish_event(LOST_SUBJECT, Lost(ROUTER, "router-0", -9, expected=False))
    with pytest.raises(InstanceLost):
        await running
    await preprocess.until_empty()


async def test_deadline(start: Start, hanging_url: str) -> None:
    preprocess = await start(allow_private_media=True)
    with pytest.raises(DeadlineExceeded):
        await preprocess.ask(url=hanging_url, timeout_s=0.2)
    await preprocess.until_empty()


async def test_lease_expires(start: Start) -> None:
    """The backstop, when a router forgets to release."""
    preprocess = await start()
    reply = await preprocess.upload(_png(), timeout_s=1.0)
    await preprocess.until_empty()
    with pytest.raises(InstanceLost):
        await preprocess.pull(reply.pixels)


async def test_draining_refuses_new_work_and_waits_for_what_is_leased(start: Start) -> None:
    preprocess = await start()
    reply = await preprocess.upload(_png())
    await preprocess.bus.request(preprocess.context.instance_id, DrainRequest(), 10)
    with pytest.raises(Overloaded):
        await preprocess.ask(R2, url="http://127.0.0.1/")
    assert (await preprocess.post("/media", _png(), R2))[0] == 503
    assert not preprocess.exited.done()
    assert (await preprocess.pull(reply.pixels)).shape == reply.pixels.shape
    assert await asyncio.wait_for(asyncio.shield(preprocess.exited), 10) == 0


async def test_a_kept_file_whose_request_is_refused_does_not_hold_up_draining(start: Start) -> None:
    preprocess = await start()
    await preprocess.pull((await preprocess.upload(_png())).pixels)
    media_id = await preprocess.keep()
    await preprocess.bus.request(preprocess.context.instance_id, DrainRequest(), 10)
    assert not preprocess.exited.done()
    with pytest.raises(Overloaded):
        await preprocess.ask(media_id=media_id)
    assert await asyncio.wait_for(asyncio.shield(preprocess.exited), 10) == 0
