"""The prefill role: takes a prompt with its embeddings, computes its KV in chunks, samples the first token, leases the KV.

This is the intake; the embeddings are in inputs.py, the queue and the steps in batch.py. Used by the instance host.
"""

from __future__ import annotations

import asyncio
import math
import time

from triptych.services.host_context import HostContext
from triptych.services.prefill.batch import PrefillBatch
from triptych.services.prefill.checks import check_request, image_places
from triptych.services.prefill.inputs import PromptInputs
from triptych.services.prefill.job import PrefillJob
from triptych.services.prefill.prefix_pull import asked_for, pull_prefix
from triptych.shared.budget import Budget
from triptych.shared.engine.api import Sequence
from triptych.shared.engine.loop import StepLoop
from triptych.shared.engine.role import LEASE_GRACE_S, MAX_PULLS, Intake, deadline, given_up, settle
from triptych.shared.errors import CACHE_MISS, InstanceLost, InternalError, Overloaded
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import (
    Accepted,
    EmbeddingsReady,
    InstanceRequest,
    Message,
    PrefillReply,
    PrefillRequest,
    RequestId,
    StageTime,
)
from triptych.shared.policies.batching import finish_reason
from triptych.shared.token_bytes import unpack_tokens


class PrefillRole:
    """Implements StageRole."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._intake = Intake("prefill", context.settings.max_waiting)
        self._batch = PrefillBatch(context)
        # bytes pulled, or to be, for prompts not yet computed
        self._in_hand: Budget[PrefillJob] = Budget(context.settings.tensor_store_bytes, self._batch.in_order)
        self._pulls = asyncio.Semaphore(MAX_PULLS)
        self._loop = StepLoop("prefill", self._batch.step, self._batch.fail_all)
        self._jobs: dict[RequestId, PrefillJob] = {}
        self._max_new_tokens: int | None = None

    async def start(self) -> None:
        self._context.kv.on_freed(self._loop.wake)
        self.open_intake()
        self._loop.start()

    def open_intake(self) -> None:
        self._intake.is_open = True

    def close_intake(self) -> None:
        self._intake.is_open = False

    def take_at_most(self, num_tokens: int | None) -> None:
        """From now on only prompts of which all but so many tokens are cached here, and no more tokens in a step, for decode
        waits for it; None: all prompts."""
        self._max_new_tokens, limit = num_tokens, self._context.settings.max_prefill_tokens
        self._batch.max_tokens = limit if num_tokens is None else min(num_tokens, limit)

    def is_idle(self) -> bool:
        return not self._jobs and self._batch.is_empty() and not self._loop.is_stepping

    async def stop(self) -> None:
        self.close_intake()
        await self._loop.stop()
        for job in self._jobs.values():
            settle(job.result, given_up())
        self._context.kv.forget(self._loop.wake)

    def load(self) -> StageLoad:
        num_running = self._batch.num_running
        num_pending_tokens = sum(job.num_pending_tokens for job in self._jobs.values())
        num_waiting = max(len(self._jobs) - num_running, 0)
        return StageLoad("prefill", num_waiting, num_running, num_pending_tokens, self._batch.rate.tokens_per_s)

    async def handle(self, request: InstanceRequest) -> Message:
        """Compute one prompt, or take embeddings that one waits for.

        Raises:
            TriptychError: refused, its inputs are gone or don't fit together, or its time ran out.
        """
        if isinstance(request, EmbeddingsReady):
            return self._land(request)
        if not isinstance(request, PrefillRequest):
            raise InternalError(f"prefill has no use for a {type(request).__name__}")
        self._intake.check(len(self._jobs) - self._batch.num_running)
        check_request(request, self._context.max_model_len)
        if request.request_id in self._jobs:
            raise InternalError("a request came twice", code="invalid_message")
        job = self._jobs[request.request_id] = self._new_job(request)
        try:
            async with deadline(request.timeout_s):
                return await self._prefill_one(request, job)
        except InstanceLost as error:
            if error.code == CACHE_MISS and request.prefix is None:  # somebody was told that these pictures' KV is here
                self._context.prefixes.note_stale(job.cacheable_keys)
            raise
        finally:
            del self._jobs[request.request_id]
            self._batch.leave(job)
            await job.inputs.close()

    def _land(self, ready: EmbeddingsReady) -> Accepted:
        job = self._jobs.get(ready.request_id)
        if job is None:
            raise InstanceLost("the prompt of an image is no longer here", code="request_released")
        job.inputs.offer(ready.index, ready.embeddings)
        return Accepted()

    def _new_job(self, request: PrefillRequest) -> PrefillJob:
        """Nothing of it is here yet."""
        result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        inputs = PromptInputs(
            self._context,
            request.images,
            self._pulls,
            lambda num_bytes: self._in_hand.add(num_bytes, job),
            self._loop.wake,
            lambda error: settle(result, error),
        )
        num_tokens = request.prompt.num_tokens
        sequence = Sequence(request.request_id, [], num_tokens - request.num_output_tokens, request.sampling, inputs.spans)
        job = PrefillJob(sequence, num_tokens, inputs, result, time.monotonic(), request.slack_s)
        return job

    async def _prefill_one(self, request: PrefillRequest, job: PrefillJob) -> PrefillReply:
        context = self._context
        job.sequence.token_ids = await self._token_ids(request)
        transfer_s = time.monotonic() - job.arrived_at_s
        job.chain = context.prefixes.chain_of(job.sequence.token_ids, image_places(request.images), request.cache_salt)
        num_held = context.prefixes.num_held(job.cacheable_keys)
        async with self._in_hand.hold(self._num_bytes(request, job, num_held), job):
            pull_began_s = time.monotonic()
            job.pulled = await pull_prefix(context, request, job.cacheable_keys, num_held)
            num_cached_blocks = num_held if job.pulled is None else job.pulled.end
            job.num_cached_tokens = num_cached_blocks * context.engine.block_size
            self._check_follow_up(job)
            job.inputs.want(job.num_cached_tokens)
            await job.inputs.here()
            transfer_s += time.monotonic() - pull_began_s
            self._batch.add(job)
            self._loop.wake()
            first_token = await job.result
        now_s = time.monotonic()
        begun_at_s = job.begun_at_s or now_s
        queued_s = begun_at_s - job.arrived_at_s - transfer_s
        spent = StageTime("prefill", context.instance_id, queued_s, transfer_s, now_s - begun_at_s)
        return await self._reply(request, job, first_token, spent)

    def _check_follow_up(self, job: PrefillJob) -> None:
        """Raises Overloaded when only follow-ups are taken and that is none: what the router was told of is not here."""
        if self._max_new_tokens is None:
            return
        if job.num_pending_tokens > self._max_new_tokens:
            self._context.prefixes.note_stale(job.cacheable_keys)
            raise Overloaded("this instance only takes prompts of which it holds most", code="stage_unavailable")
        self._context.metrics.follow_ups.inc()

    async def _token_ids(self, request: PrefillRequest) -> list[int]:
        ref = request.prompt.leased
        if ref is None:
            return unpack_tokens(request.prompt.inline)
        async with self._pulls:
            tensor = await self._context.pull(ref)
        token_ids = unpack_tokens(tensor.numpy().tobytes())
        self._context.drop(ref)
        return token_ids

    def _num_bytes(self, request: PrefillRequest, job: PrefillJob, num_held: int) -> int:
        """What will be pulled, when everything is where it is thought to be."""
        engine = self._context.engine
        num_cached_blocks = max(num_held, len(asked_for(request, job.cacheable_keys)))
        shape, dtype = engine.exported_shape(num_cached_blocks - num_held)
        return job.inputs.num_bytes(num_cached_blocks * engine.block_size) + dtype.itemsize * math.prod(shape)

    async def _reply(self, request: PrefillRequest, job: PrefillJob, first_token: int, spent: StageTime) -> PrefillReply:
        sequence, num_cached_tokens = job.sequence, job.num_cached_tokens
        num_output, num_tokens = request.num_output_tokens + 1, request.prompt.num_tokens + 1
        reason = finish_reason(request.sampling, first_token, num_output, num_tokens, self._context.max_model_len)
        if reason is not None:
            return PrefillReply(first_token, spent, reason, None, sequence.logprobs, num_cached_tokens)
        keys, tail = (b"", b"") if job.chain is None else (job.chain.packed(), job.chain.tail)
        kv = await self._context.kv.lease(sequence, request.timeout_s + LEASE_GRACE_S, keys, tail)
        return PrefillReply(first_token, spent, None, kv, sequence.logprobs, num_cached_tokens)
