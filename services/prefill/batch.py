"""The prefill queue and its steps: prompts are admitted in order when blocks for all of each are free, and computed in
chunks, several prompts per step. A prompt that breaks the engine fails alone. Event loop only, but for `_compute`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from triptych.shared.engine.api import Chunk, Sequence
from triptych.shared.engine.isolate import as_typed, run_isolated
from triptych.shared.engine.role import HostContext, settle
from triptych.shared.policies.batching import chunk_sizes


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prompt. result: its first output token. While is_in_step the engine thread uses its blocks: a job that leaves
    then is freed when the step ends. Times are monotonic."""

    sequence: Sequence
    result: asyncio.Future[int]
    queued_at_s: float
    begun_at_s: float = 0.0
    is_prepared: bool = False
    is_in_step: bool = False
    has_left: bool = False


class PrefillBatch:
    """See the module's docstring."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._waiting: deque[PrefillJob] = deque()
        self._running: list[PrefillJob] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    def is_empty(self) -> bool:
        return not self._waiting and not self._running

    def add(self, job: PrefillJob) -> None:
        self._waiting.append(job)

    def leave(self, job: PrefillJob) -> None:
        """Forget a job and free its blocks, now or when the step it is in ends. Idempotent."""
        job.has_left = True
        if job in self._waiting:
            self._waiting.remove(job)
        if job in self._running:
            self._running.remove(job)
        if not job.is_in_step:
            self._context.kv.free(job.sequence)

    async def step(self) -> bool:
        """Admit and compute one step; False when there is nothing to compute."""
        self._admit()
        jobs = list(self._running)
        sizes = chunk_sizes([_num_remaining(job) for job in jobs], self._context.settings.max_prefill_tokens)
        batch = [(job, size) for job, size in zip(jobs, sizes, strict=True) if size > 0]
        if not batch:
            return False
        for job, _ in batch:
            job.is_in_step = True
        try:
            outcomes = await self._context.compute(self._compute, batch)
        finally:
            for job, _ in batch:
                job.is_in_step = False
                if job.has_left:
                    self._context.kv.free(job.sequence)
        for (job, _), outcome in zip(batch, outcomes, strict=True):
            self._take(job, outcome)
        return True

    def fail_all(self, error: Exception) -> None:
        """End every job with `error`."""
        for job in (*self._running, *self._waiting):
            self._end(job, error)

    def _admit(self) -> None:
        """First come, first served: a prompt that doesn't fit yet is not overtaken, so it can't starve."""
        kv = self._context.kv
        while self._waiting:
            job = self._waiting[0]
            blocks = kv.allocate(kv.num_for(len(job.sequence.token_ids)), keep_free=kv.num_claimed)
            if blocks is None:
                return
            job.sequence.block_table = blocks
            job.begun_at_s = time.monotonic()
            self._running.append(self._waiting.popleft())

    def _compute(self, batch: list[tuple[PrefillJob, int]]) -> list[int | Exception | None]:
        """On the engine thread."""
        engine = self._context.engine
        outcomes: list[int | Exception | None] = [None] * len(batch)
        sound = []
        for i, (job, _) in enumerate(batch):
            try:
                if not job.is_prepared:
                    engine.prepare(job.sequence)
                    job.is_prepared = True
                sound.append(i)
            except Exception as error:
                outcomes[i] = error
        computed = run_isolated(engine, [Chunk(batch[i][0].sequence, batch[i][1]) for i in sound])
        for i, outcome in zip(sound, computed, strict=True):
            outcomes[i] = outcome
        return outcomes

    def _take(self, job: PrefillJob, outcome: int | Exception | None) -> None:
        if job.has_left or outcome is None:
            return
        if isinstance(outcome, Exception):
            self._end(job, outcome)
        else:
            self._running.remove(job)  # it keeps its blocks: whoever waits for the result has them next
            settle(job.result, outcome)

    def _end(self, job: PrefillJob, error: Exception) -> None:
        self.leave(job)
        settle(job.result, as_typed(error, "computing the prompt"))


def _num_remaining(job: PrefillJob) -> int:
    return len(job.sequence.token_ids) - job.sequence.num_computed_tokens
