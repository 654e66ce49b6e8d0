"""The running decode batch: who joins, who gets blocks, who is preempted, one token for each per step (more where they are
known ahead: ahead.py).

On a lack of blocks, when none is left that is only cached, the youngest sequence is preempted: its blocks are exported to
host memory (preempted.py) and imported again later, which is token-exact. Older requests go first everywhere. Event loop only,
but for `_compute`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from triptych.services.decode.ahead import num_steps_ahead
from triptych.services.decode.job import DecodeJob
from triptych.services.decode.preempted import PreemptedKv
from triptych.services.host_context import HostContext
from triptych.shared.engine.api import Chunk
from triptych.shared.engine.isolate import as_typed, run_isolated
from triptych.shared.engine.rate import Rate
from triptych.shared.engine.role import settle
from triptych.shared.engine.shared_cores import Rank
from triptych.shared.engine.thread import Turn
from triptych.shared.messages import KvRef
from triptych.shared.policies.decode_pace import DecodePace, Step

Outcome = list[int] | Exception
OnOutcome = Callable[[DecodeJob, Outcome], None]


class DecodeBatch:
    """Jobs that have their KV: waiting for blocks or a place in the batch, or running. rate: of generating tokens.

    Args:
        on_outcome: called for each job of a step with its next tokens, of which only the last may end its output, or with the
            error that ends it.
    """

    def __init__(self, context: HostContext, on_outcome: OnOutcome) -> None:
        self._context = context
        self._on_outcome = on_outcome
        self._preempted_kv = PreemptedKv(context)
        self._waiting: list[DecodeJob] = []
        self._running: list[DecodeJob] = []
        self.num_preemptions = 0
        self.rate = Rate()
        self._pace = DecodePace(context.settings.slo_tbt_s)
        self._begun_at_s = 0.0  # of the step under way; when it has waited for others, after that

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def is_empty(self) -> bool:
        return not self._waiting and not self._running

    def add(self, job: DecodeJob) -> None:
        """The job's KV is here: in `job.kv`, or in blocks that it took over."""
        self._waiting.append(job)
        self.hurry()

    def leave(self, job: DecodeJob) -> None:
        """Forget a job and free its blocks, now or when the engine is done with them. Idempotent."""
        job.has_left = True
        for jobs in (self._waiting, self._running):
            if job in jobs:
                jobs.remove(job)
        if job.is_in_step:
            self.hurry()
        else:
            self._keep(job)
            self._free(job)
        self._claim()

    def hurry(self) -> None:
        """Something is to happen between two steps: where several are made at once, make no more."""
        if self._context.steps_ahead is not None:
            self._context.steps_ahead.hurry()

    def has(self, job: DecodeJob) -> bool:
        """Whether it waits or runs here."""
        return job in self._waiting or job in self._running

    async def lease(self, job: DecodeJob, lease_s: float) -> KvRef:
        """Between two steps: a job whose KV is in one piece leaves, and that is kept for whoever goes on with it. Raises
        TriptychError, and then it has to be computed again."""
        kv, sequence = self._context.kv, job.sequence
        job.has_left = True
        job.extend_chain()
        keys, tail = (b"", b"") if job.chain is None else (job.chain.packed(), job.chain.tail)
        try:
            if job.kv is not None:
                return await kv.lease_copy(job.kv, sequence, lease_s, keys, tail)
            self._keep(job)
            return await kv.lease(sequence, lease_s, keys, tail)
        finally:
            self.leave(job)

    async def step(self) -> bool:
        """One token for every running job that has its turn, or more; False when none runs."""
        self._join()
        await self._reserve()
        self._claim()
        if not self._running:
            return False
        num_ahead = num_steps_ahead(self._context, self._running)
        step = Step(list(self._running), 0.0, 0.0) if num_ahead else self._pace.next_step(self._running, time.monotonic())
        batch = step.outputs
        self._enter(batch)
        self._begun_at_s = time.monotonic()
        try:
            outcomes = await self._outcomes(batch, num_ahead, Turn(Rank.LAST, step.for_long_s, step.for_brief_s))
        finally:
            self._exit(batch)
        ended_at_s = time.monotonic()
        num_tokens = sum(1 if isinstance(outcome, Exception) else len(outcome) for outcome in outcomes)
        self.rate.note(num_tokens, ended_at_s - self._begun_at_s)
        for job, outcome in zip(batch, outcomes, strict=True):
            if job.has_left:
                continue
            job.kv, job.shared, job.is_preempted = None, {}, False  # now in its blocks
            job.stepped_at_s = ended_at_s
            if isinstance(outcome, Exception):
                job.chain = None  # whatever is in them is not to be cached
            elif not job.is_kept:
                self._keep(job)
            settle(job.joined, None)
            self._on_outcome(job, outcome)
        return True

    async def _outcomes(self, batch: list[DecodeJob], num_ahead: int, turn: Turn) -> Sequence[Outcome]:
        ahead = self._context.steps_ahead
        if ahead is None or not num_ahead:
            return await self._context.compute(self._compute, batch, turn)
        return await ahead.run([job.sequence for job in batch], num_ahead)

    def fail_all(self, error: Exception) -> None:
        """End every job with `error`."""
        for job in (*self._running, *self._waiting):
            self._on_outcome(job, error)

    def _join(self) -> None:
        """Move waiting jobs to the batch: the preempted, then the others, each oldest first. One that lacks blocks is not
        overtaken by others that need some, so that nothing new comes into the pool while there are preempted ones."""
        may_allocate = True
        for job in sorted(self._waiting, key=lambda job: (not job.is_preempted, _age(job))):
            if len(self._running) >= self._context.settings.max_num_seqs:
                break
            if job.kv is not None and not (may_allocate and self._give_blocks(job)):
                may_allocate = False
                continue
            self._waiting.remove(job)
            self._running.append(job)
            if job.begun_at_s is None:
                job.begun_at_s = time.monotonic()
        self._running.sort(key=_age)

    def _give_blocks(self, job: DecodeJob) -> bool:
        """Blocks for a job's KV: of those that it shared, the ones that are still here, and new ones."""
        held = self._context.prefixes.take(list(job.shared))
        rest = self._context.kv.allocate(self._num_needed(job) - len(held), keep_free=len(self._running))
        if rest is None:
            self._context.prefixes.give_back(held)
            return False
        job.sequence.block_table, job.num_found = held + rest, len(held)
        return True

    async def _reserve(self) -> None:
        """Give every running job a block for its next token, preempting the youngest for the older."""
        for job in list(self._running):
            while job in self._running and self._lacks_block(job):
                block = self._context.kv.allocate(1)
                if block is not None:
                    job.sequence.block_table += block
                    continue
                holders = [one for one in (*self._running, *self._waiting) if one.sequence.block_table]
                await self._preempt(max(holders, key=_age))

    def _lacks_block(self, job: DecodeJob) -> bool:
        return self._num_needed(job) > len(job.sequence.block_table)

    async def _preempt(self, job: DecodeJob) -> None:
        """Move a job's KV to host memory and its blocks back to the pool. Nothing else runs between the latter and the
        return to the caller, so that it gets them."""
        self.num_preemptions += 1
        if job.kv is None and not await self._export(job):
            return
        job.is_preempted = True
        if job in self._running:
            self._running.remove(job)
            self._waiting.append(job)
        self._free(job, keep_kv=True)

    async def _export(self, job: DecodeJob) -> bool:
        """Whether the job's KV was copied; when not, the job was ended and its blocks are free."""
        self._enter([job])
        try:
            await self._preempted_kv.copy(job, [one for one in self._waiting if one.is_preempted])
        except Exception as error:
            self._on_outcome(job, as_typed(error, "moving KV blocks"))
        finally:
            self._exit([job])
        return not job.has_left

    def _compute(self, batch: list[DecodeJob]) -> list[Outcome]:
        """On the engine thread: import the KV of those who joined, then one token for each."""
        engine = self._context.engine
        began_s = self._begun_at_s = time.monotonic()
        outcomes: list[Outcome] = []
        for job in batch:
            try:
                self._import(job)
                outcomes.append([])
            except Exception as error:
                outcomes.append(error)
        sound = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, Exception)]
        computed = run_isolated(engine, [Chunk(batch[i].sequence, 1) for i in sound])
        for i, outcome in zip(sound, computed, strict=True):
            if outcome is None:
                outcome = RuntimeError("the engine gave no token")
            outcomes[i] = outcome if isinstance(outcome, Exception) else [outcome]
        self._pace.note(len(batch), time.monotonic() - began_s)
        return outcomes

    def _import(self, job: DecodeJob) -> None:
        engine, sequence = self._context.engine, job.sequence
        if job.kv is not None:
            for place, block in list(enumerate(job.shared.values()))[job.num_found :]:
                engine.import_blocks(block, sequence.block_table[place : place + 1])
            num_blocks = self._context.kv.num_for(sequence.num_computed_tokens)
            engine.import_blocks(job.kv, sequence.block_table[len(job.shared) : num_blocks])

    def _keep(self, job: DecodeJob) -> None:
        """Let others have what is computed of a job whose KV is in its blocks."""
        sequence, chain = job.sequence, job.chain
        if chain is not None and job.kv is None and sequence.block_table:
            if job.has_left:
                job.extend_chain()
            self._context.prefixes.add(sequence, chain.keys)
            job.is_kept = True

    def _enter(self, batch: list[DecodeJob]) -> None:
        for job in batch:
            job.is_in_step = True

    def _exit(self, batch: list[DecodeJob]) -> None:
        """The engine is done with these jobs' blocks: free those of the jobs that left meanwhile."""
        for job in batch:
            job.is_in_step = False
            if job.has_left:
                self._keep(job)
                self._free(job)

    def _free(self, job: DecodeJob, keep_kv: bool = False) -> None:
        if not keep_kv:
            job.kv, job.shared = None, {}
        job.is_kept = False
        self._context.kv.free(job.sequence)

    def _claim(self) -> None:
        """Have prefill on the same instance leave free blocks: one per running job, what all preempted jobs wait for (else
        new prompts took their place again and again), and what the oldest of the others here waits for."""
        preempted = [job for job in self._waiting if job.is_preempted]
        others = sorted((job for job in self._waiting if job.kv is not None and not job.is_preempted), key=_age)
        num_waited_for = sum(self._num_needed(job) for job in (*preempted, *others[:1]))
        self._context.kv.claim(len(self._running) + num_waited_for)

    def _num_needed(self, job: DecodeJob) -> int:
        """Blocks for the job's tokens and its next one."""
        return self._context.kv.num_for(job.sequence.num_computed_tokens + 1)


def _age(job: DecodeJob) -> float:
    return job.arrived_at_s
