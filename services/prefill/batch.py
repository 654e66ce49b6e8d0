"""The prefill queue and its steps: prompts are admitted in order when blocks for all of each are free, and computed in
chunks, several prompts per step, each up to its first image that has not landed. What is cached is not computed. A prompt
that breaks the engine fails alone. Event loop only, but for `_compute`.

A prompt with nothing to compute takes no part: it neither gets blocks nor keeps others from theirs. One that stalls half-way
keeps its blocks until others lack them; then it is parked: what is full of them stays in the prefix cache as long as there
is room, and it is admitted again when an image has landed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from triptych.services.host_context import HostContext
from triptych.services.prefill.job import PrefillJob
from triptych.shared.engine.api import Chunk
from triptych.shared.engine.isolate import as_typed, run_isolated
from triptych.shared.engine.rate import Rate
from triptych.shared.engine.role import settle
from triptych.shared.engine.shared_cores import Rank
from triptych.shared.engine.thread import Turn
from triptych.shared.policies.batching import chunk_sizes


class PrefillBatch:
    """See the module's docstring. rate: of computing prompts. max_tokens: of one step."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._attends_to_all = context.engine.attends_to_all
        self._waiting: list[PrefillJob] = []
        self._running: list[PrefillJob] = []
        self.rate = Rate()
        self.max_tokens = context.settings.max_prefill_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    def is_empty(self) -> bool:
        return not self._waiting and not self._running

    def add(self, job: PrefillJob) -> None:
        self._waiting.append(job)

    def leave(self, job: PrefillJob) -> None:
        """Forget a job and free its blocks, now or when the step it is in ends; what was computed of it before stays in the
        cache: it may be asked for again. Idempotent."""
        job.has_left = True
        for jobs in (self._waiting, self._running):
            if job in jobs:
                jobs.remove(job)
        if not job.is_in_step:
            self._give_back(job)

    async def step(self) -> bool:
        """Admit and compute one step; False when there is nothing to compute."""
        self._admit()
        for job in self._running:
            self._catch_up(job)
        jobs = self.in_order(self._running)
        num_ready = [job.num_ready(job.sequence.num_computed_tokens, self._attends_to_all) for job in jobs]
        sizes = chunk_sizes(num_ready, self.max_tokens)
        batch = [(job, size) for job, size in zip(jobs, sizes, strict=True) if size > 0]
        if not batch:
            return False
        for job, _ in batch:
            job.is_in_step = True
        num_before = [job.sequence.num_computed_tokens for job, _ in batch]
        began_s = time.monotonic()
        rank = Rank.LONG if any(job.takes_long for job, _ in batch) else Rank.BRIEF
        try:
            outcomes = await self._context.compute(self._compute, batch, Turn(rank))
        finally:
            for (job, _), num_computed_tokens in zip(batch, num_before, strict=True):
                job.is_in_step = False
                if job.has_left:  # perhaps with its images, which lay where others are now
                    job.sequence.num_computed_tokens = num_computed_tokens
                    self._give_back(job)
        num_tokens = sum(size for _, size in batch)
        self.rate.note(num_tokens, time.monotonic() - began_s)
        self._context.metrics.prompt_tokens.inc(num_tokens)
        for (job, _), outcome in zip(batch, outcomes, strict=True):
            self._take(job, outcome)
        return True

    def fail_all(self, error: Exception) -> None:
        """End every job with `error`."""
        for job in (*self._running, *self._waiting):
            self._end(job, error)

    def in_order(self, jobs: Sequence[PrefillJob]) -> list[PrefillJob]:
        """As the policy has it."""
        for job in jobs:
            job.work_s = self.rate.time_s(job.num_pending_tokens)
        return self._context.policies.queue_order(jobs, time.monotonic())

    def _admit(self) -> None:
        """In order: a prompt that could be computed and doesn't fit yet is not overtaken, so it can't starve."""
        if self._context.kv.num_available < self._context.kv.num_claimed:
            self._park()
        for job in self.in_order(self._waiting):
            num_cached_blocks = self._num_cached_blocks(job)
            num_cached_tokens = num_cached_blocks * self._context.engine.block_size
            job.inputs.want(num_cached_tokens)
            has_landed = job.num_landed_when_parked != job.inputs.num_landed
            if not has_landed or not job.num_ready(num_cached_tokens, self._attends_to_all):
                continue
            is_given = self._give_blocks(job, num_cached_blocks)
            if not is_given and not (self._park() and self._give_blocks(job, num_cached_blocks)):
                return
            self._begin(job, num_cached_tokens)

    def _num_cached_blocks(self, job: PrefillJob) -> int:
        num_held, pulled = self._context.prefixes.num_held(job.cacheable_keys), job.pulled
        return pulled.end if pulled is not None and pulled.first <= num_held < pulled.end else num_held

    def _give_blocks(self, job: PrefillJob, num_cached_blocks: int) -> bool:
        """Blocks for the whole prompt: those that are cached here, new ones for what was pulled and for the rest."""
        kv, prefixes = self._context.kv, self._context.prefixes
        num_held = num_cached_blocks
        if job.pulled is not None and num_cached_blocks == job.pulled.end:
            num_held = job.pulled.first
        else:
            job.pulled = None
        held = prefixes.take(job.cacheable_keys[:num_held])
        rest = kv.allocate(kv.num_for(job.num_tokens) - num_held, keep_free=kv.num_claimed)
        if rest is None:
            prefixes.give_back(held)
            return False
        job.sequence.block_table = held + rest
        return True

    def _begin(self, job: PrefillJob, num_cached_tokens: int) -> None:
        job.sequence.num_computed_tokens = num_cached_tokens
        if job.begun_at_s is None:
            job.begun_at_s = time.monotonic()
            job.num_cached_tokens = num_cached_tokens
            self._context.prefixes.note(job.cacheable_keys, num_cached_tokens // self._context.engine.block_size)
        self._waiting.remove(job)
        self._running.append(job)

    def _catch_up(self, job: PrefillJob) -> None:
        """Prompts that begin alike and came together: the first one computes it for all, the others have their turn later."""
        if job.pulled is None:
            job.num_cached_tokens += self._context.prefixes.catch_up(job.sequence, job.cacheable_keys)

    def _park(self) -> bool:
        """Take the blocks of stalled prompts; whether there were any."""
        stalled = [job for job in self._running if not job.num_ready(job.sequence.num_computed_tokens, self._attends_to_all)]
        for job in stalled:
            self._give_back(job)
            job.sequence.num_computed_tokens = 0
            job.num_landed_when_parked = job.inputs.num_landed
            self._running.remove(job)
            self._waiting.append(job)
        return bool(stalled)

    def _give_back(self, job: PrefillJob) -> None:
        if job.sequence.block_table and job.pulled is None:
            self._context.prefixes.add(job.sequence, job.keys)
        self._context.kv.free(job.sequence)

    def _compute(self, batch: list[tuple[PrefillJob, int]]) -> list[int | Exception | None]:
        """On the engine thread."""
        engine = self._context.engine
        outcomes: list[int | Exception | None] = [None] * len(batch)
        sound = []
        for i, (job, _) in enumerate(batch):
            try:
                self._prepare(job)
                sound.append(i)
            except Exception as error:
                outcomes[i] = error
        computed = run_isolated(engine, [Chunk(batch[i][0].sequence, batch[i][1]) for i in sound])
        for i, outcome in zip(sound, computed, strict=True):
            outcomes[i] = outcome
        return outcomes

    def _prepare(self, job: PrefillJob) -> None:
        engine = self._context.engine
        if not job.is_prepared:
            engine.prepare(job.sequence)
            job.is_prepared = True
        if job.pulled is not None:
            engine.import_blocks(job.pulled.tensor, job.sequence.block_table[job.pulled.first : job.pulled.end])
            job.pulled = None

    def _take(self, job: PrefillJob, outcome: int | Exception | None) -> None:
        if job.has_left:
            return
        if isinstance(outcome, Exception):
            self._end(job, outcome)
            return
        if outcome is not None:
            self._context.prefixes.add(job.sequence, job.keys)
            self._running.remove(job)  # it keeps its blocks: whoever waits for the result has them next
            settle(job.result, outcome)

    def _end(self, job: PrefillJob, error: Exception) -> None:
        job.chain = None  # whatever is in its blocks is not to be cached
        self.leave(job)
        settle(job.result, as_typed(error, "computing the prompt"))
