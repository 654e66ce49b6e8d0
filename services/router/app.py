"""The router process: takes requests for text over HTTP and leads each through the stages. Torch is never imported here."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, Request, Response

from triptych.cache.index import CacheIndex
from triptych.cache.index_metrics import IndexMetrics
from triptych.cache.known_files import KnownFiles
from triptych.cache.redis_index import open_index
from triptych.services.router.asks import Model
from triptych.services.router.cached_parts import Cache
from triptych.services.router.client_link import BodyStore
from triptych.services.router.demand import DemandCounter
from triptych.services.router.dispatch import Dispatcher
from triptych.services.router.edge import Edge, Read
from triptych.services.router.endpoints import add_endpoints
from triptych.services.router.http_errors import error_response, install_error_handlers
from triptych.services.router.job import Limits, Parts
from triptych.services.router.load_book import LoadBook
from triptych.services.router.media_gate import MediaGate
from triptych.services.router.prompt import PromptBuilder
from triptych.services.router.record import STAGES, Phase, RequestRecord
from triptych.services.router.releases import Releases
from triptych.services.router.router_metrics import RouterMetrics
from triptych.services.router.routing import Routing
from triptych.services.router.session import Api, Session
from triptych.services.router.token_streams import TokenStreams
from triptych.services.router.token_texts import TokenTexts
from triptych.services.router.tokenizing import answer_quickly, detokenize, tokenize
from triptych.services.router.uploads import Uploader
from triptych.shared.checkpoint import Checkpoint
from triptych.shared.emulation import attends_to_all, open_model
from triptych.shared.errors import InternalError, Overloaded
from triptych.shared.instance_info import StageLoad
from triptych.shared.known_costs import known_transfers
from triptych.shared.messages import FinishReason, InstanceId, InstanceRequest, Message, ReleaseRequest, Service, stream_subject
from triptych.shared.policies.policy_set import policy_set
from triptych.shared.service import Report, ServiceApp, ServiceContext
from triptych.shared.settings import Settings

ARRIVING_FACTOR = 4  # chosen: requests known to us, those whose body is still arriving included, in multiples of max_inflight
NUM_WORKER_THREADS = 2  # chosen: parsing and tokenizing; more would only take turns at the interpreter lock

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Running:
    """What exists between start and stop."""

    context: ServiceContext
    checkpoint: Checkpoint
    parts: Parts
    edge: Edge
    metrics: RouterMetrics
    releases: Releases


class RouterService:
    """A `ServiceApp`, and the `RouterView` of its own paths. index: given in tests."""

    service: Service = "router"

    def __init__(self, settings: Settings, index: CacheIndex | None = None) -> None:
        self._settings = settings
        self._index = index
        self._running: _Running | None = None
        self._inflight: dict[str, RequestRecord] = {}  # those still arriving included
        self._ids = random.Random(secrets.randbits(128))  # unique, no secrets: the system's generator costs a turn of the lock
        self._num_admitted = 0
        self._num_tokenizing = 0
        self._workers = ThreadPoolExecutor(NUM_WORKER_THREADS, thread_name_prefix="prepare")
        self._side_worker = ThreadPoolExecutor(1, thread_name_prefix="tokenize")  # a flood of these keeps no chat waiting
        self.app = FastAPI(title="Triptych", summary="OpenAI-compatible chat with pictures")
        install_error_handlers(self.app)
        add_endpoints(self.app, self)

    # --- the process's frame --------------------------------------------------------------------------------------------

    async def start(self, context: ServiceContext) -> None:
        """Opens the checkpoint and listens for tokens; stages may come later."""
        loop = asyncio.get_running_loop()
        checkpoint = await loop.run_in_executor(self._workers, open_model, self._settings)
        prompts = await loop.run_in_executor(self._workers, PromptBuilder, checkpoint)
        book = LoadBook(context.registry, checkpoint.revision, self._settings.block_size)
        dispatcher = Dispatcher(context.registry, book, self._settings.stage_wait_s)
        streams = TokenStreams()
        for on_lost in (dispatcher.on_lost, streams.on_lost, book.on_lost):
            context.on_lost(on_lost)
        await context.bus.listen(stream_subject(context.instance_id), streams.on_event)
        releases = Releases(context.bus)
        context.bus.on_reconnected(releases.on_reconnected)
        limits = Limits(
            self.max_model_len,
            checkpoint.eos_token_ids,
            self._settings.max_attempts,
            self._settings.slo_ttft_text_s,
            self._settings.slo_ttft_picture_s,
        )
        routing = Routing(policy_set(self._settings.policy), book)
        parts = Parts(
            router_id=context.instance_id,
            bus=context.bus,
            book=book,
            routing=routing,
            cache=self._open_cache(checkpoint, routing),
            dispatcher=dispatcher,
            streams=streams,
            uploader=Uploader(context.instance_id),
            gate=MediaGate(),
            limits=limits,
            release=releases.release,
            demand=DemandCounter(self._settings.slo_tbt_s),
            transfers=known_transfers(self._settings),
        )
        bodies = BodyStore(max(self._settings.body_store_bytes, self._settings.max_body_bytes))
        model, texts = Model(checkpoint.name, prompts), TokenTexts(prompts.tokenizer)
        edge = Edge(self._settings, model, texts, parts, self._workers, bodies, self._admit, self._on_end)
        context.metrics.register(IndexMetrics(parts.cache.index.counters))
        self._running = _Running(context, checkpoint, parts, edge, RouterMetrics(context.metrics), releases)

    def _open_cache(self, checkpoint: Checkpoint, routing: Routing) -> Cache:
        index = self._index = self._index or open_index(self._settings, checkpoint.revision)
        return Cache(
            index=index,
            files=KnownFiles(index, checkpoint.revision),
            rules=routing.policies.cache,
            image=checkpoint.image,
            model_revision=checkpoint.revision,
            block_size=self._settings.block_size,
            attends_to_all=attends_to_all(self._settings),
        )

    async def handle(self, request: InstanceRequest) -> Message | None:
        """A router has no work for others."""
        if isinstance(request, ReleaseRequest):
            return None
        raise InternalError(f"a router has no use for a {type(request).__name__}", code="invalid_message")

    def report(self) -> Report:
        """Requests inside, arriving ones included, as the stage `router`."""
        if self._running is None:
            return Report()
        card = self._running.checkpoint.card(self.max_model_len())
        load = StageLoad("router", num_running=len(self._inflight))
        return Report(loads=(load,), model=card, demand=self._running.parts.demand.snapshot())

    def on_router_lost(self, router_id: InstanceId) -> None:
        """Another router's requests are nothing to us."""

    def is_idle(self) -> bool:
        return not self._inflight and (self._running is None or self._running.releases.is_idle)

    async def stop(self) -> None:
        if self._running is not None:
            await self._running.releases.stop()
            await self._running.parts.uploader.close()
            await self._running.parts.cache.index.close()
        for workers in (self._workers, self._side_worker):
            workers.shutdown(wait=False, cancel_futures=True)

    # --- its paths ------------------------------------------------------------------------------------------------------

    async def answer(self, api: Api, request: Request) -> Response:
        """Answer, or refuse at the door."""
        running = self._running
        try:
            if running is None:
                raise Overloaded("the server is starting")
            if running.context.is_draining:
                raise Overloaded("the server is shutting down; try another one", retry_after_s=1)
            self._check_room()
            if len(self._inflight) >= ARRIVING_FACTOR * self._settings.max_inflight:
                raise Overloaded("too many requests are arriving; try again later")
        except Overloaded as error:
            if running is not None:
                running.metrics.rejections.inc()
                running.metrics.requests.labels(error.status, "").inc()
            return error_response(error)
        now_s = time.monotonic()
        record = RequestRecord(self.new_request_id(), now_s, now_s + self._settings.request_timeout_s, Phase.ARRIVING)
        self._inflight[record.base_id] = record
        running.metrics.inflight.set(len(self._inflight))
        return await Session(running.edge, api, record, request).respond()

    def _check_room(self) -> None:
        if self._num_admitted >= self._settings.max_inflight:
            raise Overloaded(f"{self._settings.max_inflight} requests are being served; try again later")

    def _admit(self, record: RequestRecord) -> None:
        """A place inside is for requests that have arrived: slow senders don't keep others out."""
        self._check_room()
        record.move(Phase.ADMITTED)
        self._num_admitted += 1

    async def tokenize(self, request: Request) -> Response:
        """Not counted among the requests inside: it touches no stage. As many again are taken."""
        return await self._quickly(tokenize, request)

    async def detokenize(self, request: Request) -> Response:
        return await self._quickly(detokenize, request)

    async def _quickly(self, read: Read[dict[str, Any]], request: Request) -> Response:
        if self._running is None:
            return error_response(Overloaded("the server is starting"))
        if self._num_tokenizing >= self._settings.max_inflight:
            return error_response(Overloaded("too many prompts wait to be tokenized; try again later"))
        self._num_tokenizing += 1
        try:
            return await answer_quickly(replace(self._running.edge, workers=self._side_worker), read, request)
        finally:
            self._num_tokenizing -= 1

    def models(self) -> list[dict[str, Any]]:
        """Empty until a request could be answered."""
        running = self._running
        if running is None or not self.readiness()[0]:
            return []
        return [
            {
                "id": running.checkpoint.name,
                "object": "model",
                "created": 0,
                "owned_by": "triptych",
                "max_model_len": self.max_model_len(),
                **self.emulation(),
            }
        ]

    def emulation(self) -> dict[str, Any]:
        """What every answer about this server says when its GPUs are emulated."""
        emulation = self._running.checkpoint.emulation if self._running is not None else None
        return {} if emulation is None else {"emulated": msgspec.structs.asdict(emulation)}

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether every stage has an instance and we take requests; status and the instances per stage."""
        running = self._running
        if running is None:
            return False, {"status": "starting", "instances": {stage: [] for stage in STAGES}}
        instances = {stage: sorted(beat.instance_id for beat in running.parts.book.instances(stage)) for stage in STAGES}
        if running.context.is_draining:
            return False, {"status": "draining", "instances": instances}
        missing = [stage for stage in STAGES if not instances[stage]]
        if missing:
            return False, {"status": "waiting", "missing": missing, "instances": instances}
        return True, {"status": "ready", "instances": instances}

    def new_request_id(self) -> str:
        return f"{self._ids.getrandbits(96):024x}"

    def max_model_len(self) -> int:
        """Prompt and output tokens together: the least of what the instances can hold; before they are there, what the
        settings and the model allow."""
        running = self._running
        if running is None:
            return self._settings.max_model_len
        own = running.checkpoint.max_position_embeddings
        known = [self._settings.max_model_len or own, own]
        for stage in ("prefill", "decode"):
            known += [beat.model.max_model_len for beat in running.parts.book.instances(stage) if beat.model is not None]
        return min(length for length in known if length > 0)

    # --- ends -----------------------------------------------------------------------------------------------------------

    def _on_end(self, records: Sequence[RequestRecord], status: int, finish_reason: FinishReason | None, before: Phase) -> None:
        record = records[0]
        del self._inflight[record.base_id]
        self._num_admitted -= before is not Phase.ARRIVING
        if self._running is not None:
            self._running.metrics.on_end(records, status, finish_reason, before)
            self._running.parts.demand.on_end(records)
            self._running.metrics.inflight.set(len(self._inflight))
        _log.debug("request ended", request_id=record.base_id, status=status, attempts=len(record.attempts))


def make_service(settings: Settings) -> ServiceApp:
    """The router of one process."""
    return RouterService(settings)
