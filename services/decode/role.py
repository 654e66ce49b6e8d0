"""The decode role: pulls a prompt's KV blocks, or takes over its own, and streams the following tokens to the router.

One task per request from its acceptance to its last chunk; the batch and its steps are in batch.py. Used by the instance
host.
"""

from __future__ import annotations

import asyncio
import math
import time

import msgspec
import structlog

from triptych.services.decode.batch import DecodeBatch
from triptych.services.decode.checks import check_request
from triptych.services.decode.hand_over import HandOver
from triptych.services.decode.job import DecodeJob, new_job
from triptych.services.decode.outbox import Outbox
from triptych.services.host_context import HostContext
from triptych.shared.budget import Budget
from triptych.shared.engine.isolate import as_typed
from triptych.shared.engine.loop import StepLoop
from triptych.shared.engine.role import MAX_PULLS, Intake, deadline, given_up, settle
from triptych.shared.errors import DeadlineExceeded, InternalError, TriptychError
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import Accepted, DecodeRequest, FinishReason, InstanceRequest, KvRef, TokenChunk
from triptych.shared.policies.batching import finish_reason
from triptych.shared.token_bytes import BYTES_PER_TOKEN

IN_HAND_SHARE = 4  # chosen: pulled KV that waits for blocks is at most the pool's size divided by this
STAYS_S = 1.0  # chosen: what nobody else took goes on here for so long before it is handed over again
SIGN_OF_LIFE_S = 2.0  # chosen: below any router's patience with a silent stream
SIGN_CHECK_S = 0.5  # chosen
WHOLE_CHUNK_TOKENS = 16  # chosen: of an output that is only wanted whole; each message costs the router a good part of a ms

_log = structlog.get_logger(__name__)


class DecodeRole:
    """Implements StageRole."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._intake = Intake("decode", context.settings.max_waiting)
        self._in_hand: Budget[DecodeJob] = Budget(max(context.settings.kv_cache_bytes // IN_HAND_SHARE, 1))
        self._pulls = asyncio.Semaphore(MAX_PULLS)
        self._batch = DecodeBatch(context, self._on_outcome)
        self._hand_over = HandOver(context, self._batch, self._on_leased)
        self._loop = StepLoop("decode", self._step, self._batch.fail_all)
        self._outbox = Outbox(context.instance_id, context.publish_event, context.settings.stream_interval_s)
        self._jobs: set[DecodeJob] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._signs: asyncio.Task[None] | None = None

    @property
    def num_preemptions(self) -> int:
        return self._batch.num_preemptions

    async def start(self) -> None:
        self._context.kv.on_freed(self._on_freed)
        self.open_intake()
        self._loop.start()
        self._outbox.start()
        self._signs = asyncio.create_task(self._give_signs_of_life(), name="decode signs of life")

    def open_intake(self) -> None:
        self._intake.is_open = True
        self._hand_over.stay()

    def close_intake(self) -> None:
        """Requests at hand go to other decode instances as soon as there is one, or end here."""
        self._intake.is_open = False
        self.hand_over()

    def hand_over(self, num_tokens: float = math.inf) -> None:
        """Have other decode instances go on with requests: the youngest, with that many tokens in context together."""
        self._hand_over.want(self._jobs, num_tokens)
        self._batch.hurry()
        self._loop.wake()

    def is_idle(self) -> bool:
        is_empty = not self._jobs and not self._tasks and self._batch.is_empty() and self._outbox.is_empty()
        return is_empty and not self._loop.is_stepping and self._hand_over.is_idle()

    async def stop(self) -> None:
        self.close_intake()
        tasks = [*self._tasks, *([] if self._signs is None else [self._signs])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.stop()
        await self._outbox.stop()
        self._context.kv.forget(self._on_freed)
        self._context.kv.claim(0)

    def load(self) -> StageLoad:
        num_running = self._batch.num_running
        num_tokens = sum(len(job.sequence.token_ids) for job in self._jobs)
        num_waiting = len(self._jobs) - num_running
        return StageLoad("decode", num_waiting, num_running, num_tokens, self._batch.rate.tokens_per_s)

    async def handle(self, request: InstanceRequest) -> Accepted:
        """Queue one request; its tokens, or the error that ends it, come on the router's stream.

        Raises:
            TriptychError: refused, or its KV doesn't fit this instance.
        """
        if not isinstance(request, DecodeRequest):
            raise InternalError(f"decode has no use for a {type(request).__name__}")
        has_begun = len(request.output) > BYTES_PER_TOKEN or request.long_output is not None
        comes_back = request.kv.tensor.owner == self._context.instance_id and has_begun
        if not comes_back:
            self._intake.check(len(self._jobs) - self._batch.num_running)
        if request.long_output is not None:
            output = await self._context.pull(request.long_output)
            request = msgspec.structs.replace(request, output=output.numpy().tobytes(), long_output=None)
        check_request(request, self._context.engine, self._context.max_model_len)
        self._context.tasks.refuse_released(request.request_id)
        job = new_job(request, self._context.prefixes.chain_from(request.kv), time.monotonic())
        self._jobs.add(job)
        if not self._intake.is_open:
            job.stays_until_s = job.arrived_at_s + STAYS_S
            self._hand_over.want([job])
        task = asyncio.create_task(self._serve(job), name=f"decode {request.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Accepted()

    async def _serve(self, job: DecodeJob) -> None:
        request = job.request
        error: TriptychError | None = None
        try:
            with self._context.tasks.track(request.request_id, request.router_id):
                async with deadline(request.timeout_s):
                    await self._bring_kv(job)
                    await job.finished
        except DeadlineExceeded:
            error = DeadlineExceeded("the request's time ran out")
        except TriptychError as caught:
            error = caught
        except asyncio.CancelledError:
            error = given_up()
            raise
        except Exception as caught:
            error = as_typed(caught, "decoding")
        finally:
            self._batch.leave(job)
            self._jobs.discard(job)
            self._hand_over.forget(job)
            if error is not None and not self._context.tasks.is_released(request.request_id):
                self._send(job, error=error)

    async def _bring_kv(self, job: DecodeJob) -> None:
        kv = job.request.kv
        if kv.tensor.owner == self._context.instance_id and self._context.kv.has_blocks_of(kv):
            job.sequence.block_table = self._context.kv.take_over(kv)
            self._enqueue(job)
            return
        async with self._in_hand.hold(kv.tensor.num_bytes, job):
            async with self._pulls:
                if self._hand_over.is_due(job):
                    self._on_leased(job, kv)  # whoever goes on with it finds its KV where it is
                    return
                began_s = time.monotonic()
                job.kv = await self._context.pull_kv(kv.tensor)
                self._context.drop(kv.tensor)
                job.transfer_s = time.monotonic() - began_s
            self._enqueue(job)
            await job.joined

    def _enqueue(self, job: DecodeJob) -> None:
        self._batch.add(job)
        self._loop.wake()

    def _on_freed(self) -> None:
        """Somebody may wait for blocks."""
        if self._batch.has_waiting:
            self._batch.hurry()
        self._loop.wake()

    async def _step(self) -> bool:
        await self._outbox.has_room()
        await self._hand_over.step()
        return await self._batch.step()

    def _on_leased(self, job: DecodeJob, kv: KvRef | None) -> None:
        """It leaves: another instance goes on from kv; None: its KV has to be computed again."""
        if kv is None:
            settle(job.finished, given_up())
        else:
            if job.unsent:
                self._send(job)
            self._send(job, kv=kv)
            settle(job.finished, None)
        settle(job.joined, None)

    def _on_outcome(self, job: DecodeJob, outcome: list[int] | Exception) -> None:
        """A job's next tokens, or the error that ends it."""
        if isinstance(outcome, Exception):
            self._batch.leave(job)
            settle(job.finished, as_typed(outcome, "decoding"))
            settle(job.joined, None)
            return
        sequence, limit = job.sequence, self._context.max_model_len
        sequence.token_ids += outcome
        reason = finish_reason(sequence.sampling, outcome[-1], sequence.num_output_tokens, len(sequence.token_ids), limit)
        job.unsent += outcome if reason != "stop" else outcome[:-1]
        if reason != "stop" and sequence.logprobs is not None:
            job.unsent_logprobs.append(sequence.logprobs)
        if reason is not None or len(job.unsent) >= (WHOLE_CHUNK_TOKENS if job.request.whole else 1):
            self._send(job, reason)
        if reason is not None:
            self._batch.leave(job)
            settle(job.finished, None)

    def _send(
        self,
        job: DecodeJob,
        reason: FinishReason | None = None,
        error: TriptychError | None = None,
        kv: KvRef | None = None,
    ) -> None:
        now_s = time.monotonic()
        job.last_sign_at_s = now_s
        is_last = reason is not None or error is not None or kv is not None
        chunk = TokenChunk(
            request_id=job.request.request_id,
            seq=job.next_seq,
            token_ids=tuple(job.unsent),
            logprobs=tuple(job.unsent_logprobs),
            finish_reason=reason,
            error=None if error is None else error.to_wire(),
            time=job.time(self._context.instance_id, now_s) if is_last else None,
            kv=kv,
        )
        job.next_seq += len(job.unsent)
        job.unsent, job.unsent_logprobs = [], []
        self._outbox.add(job.request.router_id, chunk)

    async def _give_signs_of_life(self) -> None:
        while True:
            await asyncio.sleep(SIGN_CHECK_S)
            now_s = time.monotonic()
            for job in self._jobs:
                if now_s - job.last_sign_at_s >= SIGN_OF_LIFE_S and not job.has_left:
                    self._send(job)
