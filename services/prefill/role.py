"""The prefill role: takes a prompt with its embeddings, computes its KV in chunks, samples the first token, leases the KV.

This is the intake; the queue and the steps are in batch.py. Used by the instance host.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from triptych.services.prefill.batch import PrefillBatch, PrefillJob
from triptych.services.prefill.checks import check_request, token_ids_of
from triptych.shared.budget import Budget
from triptych.shared.engine.api import ImageSpan, Sequence
from triptych.shared.engine.loop import StepLoop
from triptych.shared.engine.role import LEASE_GRACE_S, MAX_PULLS, HostContext, Intake, deadline
from triptych.shared.errors import InternalError
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import InstanceRequest, PrefillReply, PrefillRequest, StageTime, TensorRef
from triptych.shared.policies.batching import finish_reason

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch


class PrefillRole:
    """Implements StageRole."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._intake = Intake("prefill", context.settings.max_waiting)
        self._in_hand = Budget(context.settings.tensor_store_bytes)  # bytes of inputs pulled for prompts not yet computed
        self._pulls = asyncio.Semaphore(MAX_PULLS)
        self._batch = PrefillBatch(context)
        self._loop = StepLoop("prefill", self._batch.step, self._batch.fail_all)
        self._num_requests = 0
        self._num_pending_tokens = 0

    async def start(self) -> None:
        self._context.kv.on_freed(self._loop.wake)
        self._intake.is_open = True
        self._loop.start()

    def stop_intake(self) -> None:
        self._intake.is_open = False

    def is_idle(self) -> bool:
        return self._num_requests == 0 and self._batch.is_empty() and not self._loop.is_stepping

    async def stop(self) -> None:
        self.stop_intake()
        await self._loop.stop()
        self._context.kv.forget(self._loop.wake)

    def load(self) -> StageLoad:
        num_running = self._batch.num_running
        return StageLoad("prefill", max(self._num_requests - num_running, 0), num_running, self._num_pending_tokens)

    async def handle(self, request: InstanceRequest) -> PrefillReply:
        """Compute one prompt.

        Raises:
            TriptychError: refused, its inputs are gone or don't fit together, or its time ran out.
        """
        if not isinstance(request, PrefillRequest):
            raise InternalError(f"prefill has no use for a {type(request).__name__}")
        self._intake.check(self._num_requests - self._batch.num_running)
        check_request(request, self._context.max_model_len)
        self._num_requests += 1
        self._num_pending_tokens += request.prompt.num_tokens
        try:
            async with deadline(request.timeout_s):
                return await self._prefill_one(request)
        finally:
            self._num_requests -= 1
            self._num_pending_tokens -= request.prompt.num_tokens

    async def _prefill_one(self, request: PrefillRequest) -> PrefillReply:
        arrived_at_s = time.monotonic()
        inputs = _inputs(request)
        async with self._in_hand.hold(sum(ref.num_bytes for ref in inputs)):
            pull_began_s = time.monotonic()
            tensors = await self._pull_all(inputs)
            transfer_s = time.monotonic() - pull_began_s
            sequence = _sequence(request, tensors)
            job = PrefillJob(sequence, asyncio.get_running_loop().create_future(), time.monotonic())
            try:
                self._batch.add(job)
                self._loop.wake()
                first_token = await job.result
                now_s = time.monotonic()
                waited_s = job.begun_at_s - arrived_at_s - transfer_s
                spent = StageTime("prefill", self._context.instance_id, waited_s, transfer_s, now_s - job.begun_at_s)
                return await self._reply(request, sequence, first_token, spent)
            finally:
                self._batch.leave(job)
                for ref in inputs:
                    self._context.drop(ref)

    async def _pull_all(self, refs: list[TensorRef]) -> list[torch.Tensor]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._pull(ref)) for ref in refs]
        except ExceptionGroup as errors:
            raise _first(errors) from None
        return [task.result() for task in tasks]

    async def _pull(self, ref: TensorRef) -> torch.Tensor:
        """A few at a time. The transport would refuse too many, and then others of the prompt were gone from their owner."""
        async with self._pulls:
            return await self._context.pull(ref)

    async def _reply(self, request: PrefillRequest, sequence: Sequence, first_token: int, spent: StageTime) -> PrefillReply:
        num_tokens = request.prompt.num_tokens + 1
        reason = finish_reason(request.sampling, first_token, 1, num_tokens, self._context.max_model_len)
        if reason is not None:
            return PrefillReply(first_token, spent, finish_reason=reason, logprobs=sequence.logprobs)
        kv = await self._context.kv.lease(sequence, request.timeout_s + LEASE_GRACE_S)
        return PrefillReply(first_token, spent, kv=kv, logprobs=sequence.logprobs)


def _inputs(request: PrefillRequest) -> list[TensorRef]:
    """Embeddings in order of images, then the prompt's tokens when they are leased."""
    leased = [] if request.prompt.leased is None else [request.prompt.leased]
    return [*(placed.embeddings for placed in request.images), *leased]


def _sequence(request: PrefillRequest, tensors: list[torch.Tensor]) -> Sequence:
    """tensors: those of `_inputs`."""
    data = request.prompt.inline if request.prompt.leased is None else tensors[-1].numpy().tobytes()
    return Sequence(
        request_id=request.request_id,
        token_ids=token_ids_of(data),
        num_prompt_tokens=request.prompt.num_tokens,
        sampling=request.sampling,
        images=[ImageSpan(p.offset, p.image, tensor) for p, tensor in zip(request.images, tensors, strict=False)],
    )


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
