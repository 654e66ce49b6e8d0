"""Requests that go on at other decode instances: whose turn it is to leave. Between two steps a request leaves the batch, its
KV is leased, and its router is told, which goes on elsewhere. Used by role.py.

A few at a time, so that each stands still no longer than its own transfer takes; the others go on here meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import structlog

from triptych.services.decode.batch import DecodeBatch
from triptych.services.decode.job import DecodeJob
from triptych.services.host_context import HostContext
from triptych.shared.errors import TriptychError
from triptych.shared.messages import KvRef, TensorId

MAX_UNDER_WAY = 4  # chosen: leased and not pulled yet; a transfer is short, what is between two of them is longer
UNDER_WAY_S = 5.0  # chosen: many transfers; what nobody has pulled by then (its client reads nothing) holds up no others

_log = structlog.get_logger(__name__)


class HandOver:
    """on_leased: called for each job that left, with its KV; None: that has to be computed again."""

    def __init__(self, context: HostContext, batch: DecodeBatch, on_leased: Callable[[DecodeJob, KvRef | None], None]) -> None:
        self._context = context
        self._batch = batch
        self._on_leased = on_leased
        self._wanted: set[DecodeJob] = set()
        self._under_way: dict[TensorId, float] = {}  # and how long they count as that

    def want(self, jobs: Iterable[DecodeJob], num_tokens: float = math.inf) -> None:
        """These are to leave, as soon as another instance takes requests: the youngest, with num_tokens in context together."""
        for job in sorted(jobs, key=lambda job: -job.arrived_at_s):
            if num_tokens <= 0:
                break
            num_tokens -= len(job.sequence.token_ids)
            self._wanted.add(job)

    def stay(self) -> None:
        """All others stay after all."""
        self._wanted.clear()

    def forget(self, job: DecodeJob) -> None:
        self._wanted.discard(job)

    def is_due(self, job: DecodeJob) -> bool:
        """Whether it may leave now."""
        return job in self._wanted and time.monotonic() >= job.stays_until_s and self._context.has_peer("decode")

    def is_idle(self) -> bool:
        """Nobody that left is still to be pulled: until then it may come back."""
        return not any(map(self._context.kv.is_leased, self._under_way))

    async def step(self) -> None:
        """Between two steps of the batch. One that was preempted, and shared blocks, leaves when it has its blocks again."""
        if not self._wanted or not self._context.has_peer("decode"):
            return
        now_s, is_leased = time.monotonic(), self._context.kv.is_leased
        self._under_way = {id_: until_s for id_, until_s in self._under_way.items() if now_s < until_s and is_leased(id_)}
        due = [job for job in self._wanted if now_s >= job.stays_until_s and self._batch.has(job) and not job.shared]
        for job in sorted(due, key=lambda job: job.arrived_at_s)[: MAX_UNDER_WAY - len(self._under_way)]:
            await self._hand_over(job, now_s)

    async def _hand_over(self, job: DecodeJob, now_s: float) -> None:
        request_id = job.request.request_id
        kv: KvRef | None = None
        try:
            kv = await self._batch.lease(job, job.lease_s(now_s))
        except TriptychError as error:
            _log.info("KV could not be leased", request_id=request_id, code=error.code)
        if kv is not None:
            self._under_way[kv.tensor.tensor_id] = now_s + UNDER_WAY_S
        self._on_leased(job, kv)
        if self._context.tasks.is_released(request_id):  # in this moment: nobody will ask for it
            self._context.transport.release_request(request_id)
