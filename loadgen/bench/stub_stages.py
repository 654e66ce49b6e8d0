"""Prefill and decode without a model, as one process on a real bus: what remains of a request's cost is the router's.

`python -m triptych.loadgen.bench.stub_stages` with TRIPTYCH_NATS_URL and TRIPTYCH_MODEL. Every sequence gets one token
per step, and all of stream_interval_s are one message, as from the real decode stage; the first token comes at once.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from dataclasses import dataclass

from fastapi import FastAPI

from triptych.shared.checkpoint import Checkpoint, open_checkpoint
from triptych.shared.errors import InternalError
from triptych.shared.instance_info import ModelCard, Resources, StageLoad
from triptych.shared.messages import (
    Accepted,
    DecodeRequest,
    InstanceId,
    InstanceRequest,
    KvRef,
    Message,
    PrefillReply,
    PrefillRequest,
    ReleaseRequest,
    RequestId,
    Role,
    Service,
    StageTime,
    TensorId,
    TensorRef,
    TokenBatch,
    TokenChunk,
    stream_subject,
)
from triptych.shared.service import Report, ServiceContext, run_service
from triptych.shared.settings import Settings, load_settings

STEP_S = 0.005  # chosen: time between tokens; 200 answers a second of 64 tokens are then 64 at a time, one full batch
NUM_BLOCKS = 1 << 20  # never full
TOKEN_IDS = (64, 65, 66, 67)  # a, b, c, d in byte-level vocabularies, which begin with "!"


@dataclass(slots=True)
class _Output:
    """num_said: its tokens up to now; the first came from prefill."""

    request: DecodeRequest
    num_said: int = 1


class StubStages:
    """Implements ServiceApp."""

    service: Service = "instance"

    def __init__(self, settings: Settings) -> None:
        self.app = FastAPI(title="stub stages")
        self._settings = settings
        self._running: dict[RequestId, _Output] = {}
        self._tensor_ids = itertools.count()
        self._context: ServiceContext
        self._checkpoint: Checkpoint
        self._stepping: asyncio.Task[None] | None = None

    async def start(self, context: ServiceContext) -> None:
        self._context = context
        self._checkpoint = await asyncio.to_thread(open_checkpoint, self._settings.model, self._settings.model_name)
        self._stepping = asyncio.create_task(self._step_forever(), name="stub steps")

    async def handle(self, request: InstanceRequest) -> Message | None:
        match request:
            case PrefillRequest():
                return PrefillReply(TOKEN_IDS[0], self._time("prefill"), kv=self._kv(request.prompt.num_tokens))
            case DecodeRequest():
                self._running[request.request_id] = _Output(request)
                return Accepted()
            case ReleaseRequest():
                self._running.pop(request.request_id, None)
                return None
            case _:
                raise InternalError(f"stub stages have no use for a {type(request).__name__}", code="invalid_message")

    def report(self) -> Report:
        roles: tuple[Role, ...] = ("prefill", "decode")
        card = ModelCard(
            self._checkpoint.name,
            self._checkpoint.revision,
            self._checkpoint.max_position_embeddings,
            self._checkpoint.random_weights,
        )
        loads = (StageLoad("prefill"), StageLoad("decode", num_running=len(self._running)))
        resources = Resources(pid=0, num_threads=0, num_blocks=NUM_BLOCKS, num_free_blocks=NUM_BLOCKS)
        return Report(loads=loads, resources=resources, roles=roles, model=card)

    def on_router_lost(self, router_id: InstanceId) -> None:
        self._running = {key: output for key, output in self._running.items() if output.request.router_id != router_id}

    def is_idle(self) -> bool:
        return not self._running

    async def stop(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)

    def _time(self, stage: str) -> StageTime:
        return StageTime(stage, self._context.instance_id)

    def _kv(self, num_tokens: int) -> KvRef:
        """A lease of nothing: the one who would pull it is this process."""
        tensor = TensorRef(
            TensorId(f"kv-{next(self._tensor_ids)}"),
            self._context.instance_id,
            (1,),
            "uint8",
            1,
            self._settings.request_timeout_s,
        )
        return KvRef(tensor, num_tokens, self._settings.block_size, 0, "stub")

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        num_steps = max(1, round(self._settings.stream_interval_s / STEP_S))  # in one message
        next_s = loop.time()
        while True:
            next_s = max(next_s + num_steps * STEP_S, loop.time())
            await asyncio.sleep(next_s - loop.time())
            by_router: dict[InstanceId, list[TokenChunk]] = {}
            for output in tuple(self._running.values()):
                by_router.setdefault(output.request.router_id, []).append(self._next_chunk(output, num_steps))
            for router_id, chunks in by_router.items():
                batch = TokenBatch(self._context.instance_id, tuple(chunks))
                await self._context.bus.publish_event(stream_subject(router_id), batch)

    def _next_chunk(self, output: _Output, num_tokens: int) -> TokenChunk:
        request_id, seq = output.request.request_id, output.num_said
        output.num_said = min(seq + num_tokens, output.request.sampling.max_tokens)
        tokens = tuple(TOKEN_IDS[i % len(TOKEN_IDS)] for i in range(seq, output.num_said))
        if output.num_said < output.request.sampling.max_tokens:
            return TokenChunk(request_id, seq, tokens)
        del self._running[request_id]
        return TokenChunk(request_id, seq, tokens, finish_reason="length", time=self._time("decode"))


if __name__ == "__main__":
    sys.exit(run_service(f"stub-{os.getpid()}", load_settings(), StubStages))
