"""The preprocess service: one message per picture -> its identity, its token count, and its pixels leased for the encoder.

Fetches (fetch.py), or gets the bytes along with the message (uploads.py), decodes in workers (decode_pool.py), puts pixels
into its transport's store. A file whose picture is known already is only identified, if that will do. Started by
`triptych serve preprocess`; asked by routers, pulled from by encoders.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import replace

from fastapi import FastAPI

from triptych.cache.index import CacheIndex
from triptych.cache.index_metrics import IndexMetrics
from triptych.cache.keys import NUM_CHANNELS
from triptych.cache.known_files import KnownFiles
from triptych.cache.redis_index import open_index
from triptych.services.preprocess.decode import DecodeOptions
from triptych.services.preprocess.decode_pool import DecodePool, TimedImage
from triptych.services.preprocess.emulated import EmulatedDecoder
from triptych.services.preprocess.fetch import MediaFetcher
from triptych.services.preprocess.media import MediaBuffer, MediaStore
from triptych.services.preprocess.preprocess_metrics import PreprocessMetrics
from triptych.services.preprocess.uploads import Bring, Uploads
from triptych.shared.checkpoint import Checkpoint
from triptych.shared.emulation import open_model
from triptych.shared.errors import BadRequest, DeadlineExceeded, InternalError, Overloaded
from triptych.shared.image_info import ImageInfo
from triptych.shared.instance_info import ModelCard, Resources, StageLoad
from triptych.shared.messages import (
    InstanceId,
    InstanceRequest,
    Message,
    PairRequest,
    PreprocessReply,
    PreprocessRequest,
    PullDone,
    PullRequest,
    ReleaseRequest,
    RequestId,
    Service,
    StageTime,
    TensorRef,
)
from triptych.shared.policies.policy_set import CacheRules, policy_set
from triptych.shared.request_tasks import RequestTasks
from triptych.shared.service import Report, ServiceApp, ServiceContext
from triptych.shared.settings import Settings
from triptych.shared.transport.api import Transport
from triptych.shared.transport.opening import open_transport


class PreprocessService:
    """See the module's docstring. Event loop only; decoding runs in the pool's workers. index: given in tests."""

    service: Service = "preprocess"

    def __init__(self, settings: Settings, index: CacheIndex | None = None) -> None:
        self.app = FastAPI(title="triptych preprocess", docs_url=None, redoc_url=None, openapi_url=None)
        self._settings = settings
        self._tasks = RequestTasks()
        self._store = MediaStore(settings.media_store_bytes, settings.max_media_bytes, settings.request_timeout_s)
        self._num_preprocessing = 0
        self._index = index
        self._context: ServiceContext
        self._checkpoint: Checkpoint
        self._options: DecodeOptions
        self._transport: Transport
        self._pool: DecodePool | EmulatedDecoder
        self._fetcher: MediaFetcher
        self._cache_rules: CacheRules
        self._files: KnownFiles
        self._metrics: PreprocessMetrics

    async def start(self, context: ServiceContext) -> None:
        settings = self._settings
        self._context = context
        self._tasks.has_ended = context.registry.has_ended
        self._checkpoint = await asyncio.to_thread(open_model, settings)
        self._options = DecodeOptions(self._checkpoint.image, self._checkpoint.revision, settings.max_image_pixels)
        self._pool = EmulatedDecoder(settings) if settings.emulate else DecodePool(settings)
        self._fetcher = _fetcher(settings)
        self._cache_rules = policy_set(settings.policy).cache
        self._index = self._index or open_index(settings, self._checkpoint.revision)
        self._files = KnownFiles(self._index, self._checkpoint.revision)
        self._metrics = PreprocessMetrics(context.metrics)
        context.metrics.register(IndexMetrics(self._index.counters))
        self._transport = await open_transport(context)
        context.on_lost(self._transport.forget_peer)
        uploads = Uploads(
            self._tasks, self._store, settings.request_timeout_s, self._preprocess, self._lease_blob, self._refuse_new
        )
        uploads.add_routes(self.app)

    async def handle(self, request: InstanceRequest) -> Message | None:
        match request:
            case PreprocessRequest():
                return await self._asked(request)
            case PullRequest():
                return await self._transport.on_pull(request)
            case PullDone():
                self._transport.on_pull_done(request)
                return None
            case PairRequest():
                return await self._transport.on_pair(request)
            case ReleaseRequest():
                self._release(request.request_id)
                return None
            case _:
                raise InternalError(f"preprocess has no use for a {type(request).__name__}", code="invalid_message")

    async def _asked(self, request: PreprocessRequest) -> PreprocessReply:
        """Over the bus: the picture's file is small, or at a URL, or was kept here."""
        try:
            self._refuse_new()
        except Overloaded:
            self._store.drop(request.media_id)  # its router goes elsewhere, with an upload
            raise
        with self._tasks.track(request.request_id, request.router_id):
            return await self._preprocess(request, lambda: self._bytes_of(request))

    async def _preprocess(self, request: PreprocessRequest, bring: Bring) -> PreprocessReply:
        """In the tracked task of its request. bring: the picture's file, which is closed after use."""
        self._num_preprocessing += 1
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._run(request, bring)
        except TimeoutError:
            raise DeadlineExceeded from None
        finally:
            self._num_preprocessing -= 1
            if self._tasks.is_released(request.request_id):  # what was kept in the last moment
                self._drop(request.request_id)

    async def _run(self, request: PreprocessRequest, bring: Bring) -> PreprocessReply:
        image_options = self._options.image.within(request.limits)
        options = replace(self._options, image=image_options, tenant_salt=request.cache_salt)
        begun_at_s = time.monotonic()
        with ExitStack() as held:
            buffer = held.enter_context(await bring())
            transfer_s = time.monotonic() - begun_at_s
            key = await self._file_key(buffer, image_options.key(), request.cache_salt)
            if key and request.may_skip_decode and (known := (await self._files.find([key]))[0]) is not None:
                held.pop_all()
                self._metrics.identified.inc()
                return self._identified(known, buffer, request, transfer_s)
            async with self._pool.decoded(buffer.data, options, request.param) as timed:
                self._metrics.decodes.inc()
                if key:
                    self._files.tell(key, timed.image.info)
                return await self._lease(timed, request, transfer_s)

    async def _file_key(self, buffer: MediaBuffer, options_key: bytes, cache_salt: bytes) -> bytes | None:
        """None where nobody would ever ask for it: the policy caches nothing."""
        if not self._cache_rules.keeps_any:
            return None
        return await self._files.key_of(buffer.data, options_key, cache_salt)

    def _identified(
        self, image: ImageInfo, buffer: MediaBuffer, request: PreprocessRequest, transfer_s: float
    ) -> PreprocessReply:
        """The bytes wait for a second request, in case that the pixels are needed after all."""
        media_id = self._store.keep(buffer, request.request_id)
        return PreprocessReply(image, None, StageTime(self.service, self._context.instance_id, 0.0, transfer_s), media_id)

    async def _lease(self, timed: TimedImage, request: PreprocessRequest, transfer_s: float) -> PreprocessReply:
        begun_at_s = time.monotonic()
        info = timed.image.info
        shape = (info.height, info.width, NUM_CHANNELS)
        ref = await self._transport.put_bytes(timed.image.pixels, shape, request.request_id, request.timeout_s)
        return PreprocessReply(info, ref, self._time(timed, transfer_s, time.monotonic() - begun_at_s))

    def _time(self, timed: TimedImage, transfer_s: float, put_s: float) -> StageTime:
        return StageTime(self.service, self._context.instance_id, timed.queued_s, transfer_s, timed.compute_s + put_s)

    async def _bytes_of(self, request: PreprocessRequest) -> MediaBuffer:
        """The caller closes the buffer."""
        if request.media_id is not None:
            return self._store.take(request.media_id, request.request_id)
        if request.url is None and not request.content:
            raise BadRequest("the image has neither a URL nor bytes", code="invalid_image", param=request.param)
        buffer = MediaBuffer(self._store)
        try:
            buffer.append(request.content)
            if request.url is not None:
                await self._fetcher.fetch(request.url, buffer, request.param)
        except BaseException:
            buffer.close()
            raise
        return buffer

    async def _lease_blob(self, blob: bytearray, request_id: RequestId) -> TensorRef:
        return await self._transport.put_bytes(blob, (len(blob),), request_id, self._settings.request_timeout_s)

    def _refuse_new(self) -> None:
        """Raises Overloaded while draining, or when too much is under way."""
        if self._context.is_draining:
            raise Overloaded("the server is shutting down: try again")
        if self._tasks.num_running >= self._settings.max_waiting:
            raise Overloaded("too many images wait to be preprocessed: try again later")

    def _release(self, request_id: RequestId) -> None:
        self._tasks.cancel(request_id)
        self._drop(request_id)

    def _drop(self, request_id: RequestId) -> None:
        self._store.release_request(request_id)
        self._transport.release_request(request_id)

    def on_router_lost(self, router_id: InstanceId) -> None:
        for request_id in self._tasks.cancel_router(router_id):
            self._release(request_id)

    def report(self) -> Report:
        self._store.sweep()
        used_bytes, capacity_bytes, num_leases = self._transport.usage()
        num_running = self._pool.num_running
        num_waiting = max(0, self._num_preprocessing - num_running) + self._store.num_kept
        resources = Resources(
            pid=0,  # filled in by the frame, as num_threads
            num_threads=0,
            tensor_store_bytes=used_bytes,
            tensor_store_capacity_bytes=capacity_bytes,
            num_leases=num_leases,
            media_store_bytes=self._store.num_bytes,
        )
        return Report(
            loads=(StageLoad("preprocess", num_waiting, num_running),),
            resources=resources,
            model=self._model_card(),
            transport=self._transport.address,
        )

    def _model_card(self) -> ModelCard:
        checkpoint = self._checkpoint
        longest = min(self._settings.max_model_len or checkpoint.max_position_embeddings, checkpoint.max_position_embeddings)
        return checkpoint.card(longest)

    def is_idle(self) -> bool:
        """Leased pixels count: an encoder still has to pull them."""
        *_, num_leases = self._transport.usage()
        return self._tasks.num_running == 0 and self._store.num_kept == 0 and num_leases == 0

    async def stop(self) -> None:
        await asyncio.to_thread(self._pool.close)
        await self._fetcher.close()
        await self._transport.close()
        if self._index is not None:
            await self._index.close()


def _fetcher(settings: Settings) -> MediaFetcher:
    if settings.allow_private_media:
        return MediaFetcher(settings.fetch_timeout_s, is_allowed=lambda address: True)
    return MediaFetcher(settings.fetch_timeout_s)


def make_service(settings: Settings) -> ServiceApp:
    return PreprocessService(settings)
