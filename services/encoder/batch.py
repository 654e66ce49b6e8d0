"""The encoder's queue and its steps: waiting images go through the vision tower in batches, in the order of the policy. One
that breaks it fails alone. Event loop only, but for the engine's own call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triptych.services.host_context import HostContext
from triptych.shared.engine.isolate import as_typed, each_alone
from triptych.shared.engine.rate import Rate
from triptych.shared.engine.role import settle
from triptych.shared.engine.shared_cores import Rank
from triptych.shared.engine.thread import Turn
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import EncodeRequest
from triptych.shared.policies.batching import is_brief, num_to_encode
from triptych.shared.policies.queueing import NO_TARGET_SLACK_S

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch

MAX_BATCH_IMAGES = 64  # chosen: bounds a batch of tiny images


@dataclass(slots=True, eq=False)
class EncodeJob:
    """One image, for all requests that wait for it. task: brings its pixels, uint8 [height, width, 3], which are set when it is
    queued. begun_at_s: when its batch began. Times are monotonic.

    arrived_at_s, slack_s, work_s: for the queue order. num_request_tokens: of all pictures of a request that waits for it, the
    smallest one.
    """

    image: ImageInfo
    result: asyncio.Future[torch.Tensor]
    arrived_at_s: float
    slack_s: float | None = None
    work_s: float = 0.0
    num_request_tokens: int = 0
    task: asyncio.Task[None] = field(init=False)
    pixels: torch.Tensor = field(init=False)
    transfer_s: float = 0.0
    begun_at_s: float = 0.0
    num_requests: int = 0

    def join(self, request: EncodeRequest, arrived_at_s: float) -> None:
        """One more request waits for it, perhaps more urgently."""
        self.num_requests += 1
        num_tokens = max(request.num_request_tokens, self.image.num_tokens)
        self.num_request_tokens = min(self.num_request_tokens or num_tokens, num_tokens)
        if self.slack_s is None and request.slack_s is None:
            return
        own_s, other_s = (NO_TARGET_SLACK_S if one is None else one for one in (self.slack_s, request.slack_s))
        self.slack_s = min(own_s, arrived_at_s + other_s - self.arrived_at_s)


class EncodeBatch:
    """See the module's docstring. rate: of vision tokens."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._queue: list[EncodeJob] = []
        self._batch: list[EncodeJob] = []
        self.rate = Rate()

    @property
    def num_running(self) -> int:
        """Requests whose image is being encoded."""
        return sum(job.num_requests for job in self._batch)

    def add(self, job: EncodeJob) -> None:
        self._queue.append(job)

    async def step(self) -> bool:
        """Encode one batch; False when nothing waits."""
        self._batch = self._take_batch()
        if not self._batch:
            return False
        began_s = time.monotonic()
        for job in self._batch:
            job.begun_at_s = began_s
        num_tokens = sum(job.image.num_tokens for job in self._batch)
        rank = Rank.BRIEF if is_brief(num_tokens, self.rate.tokens_per_s) else Rank.LONG
        outcomes = await self._context.compute(self._encode, self._batch, Turn(rank))
        self.rate.note(num_tokens, time.monotonic() - began_s)
        for job, outcome in zip(self._batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                settle(job.result, as_typed(outcome, "encoding the image"))
            else:
                if not job.image.first_piece:  # the first part counts for its image
                    self._context.metrics.images.inc()
                self._context.embeddings.add(job.image, outcome)  # also when nobody waits any more: somebody may ask again
                settle(job.result, outcome)
        self._batch = []
        return True

    def in_order(self, jobs: Sequence[EncodeJob]) -> list[EncodeJob]:
        """As the policy has it. A request's pictures are of use together, so all of them count for each."""
        for job in jobs:
            job.work_s = self.rate.time_s(job.num_request_tokens)
        return self._context.policies.queue_order(jobs, time.monotonic())

    def fail_all(self, error: Exception) -> None:
        """A step raised, which is a bug: end all that wait rather than let them hang."""
        for job in (*self._batch, *self._queue):
            settle(job.result, as_typed(error, "the encoder"))
        self._batch, self._queue = [], []

    def _take_batch(self) -> list[EncodeJob]:
        waiting = self.in_order([job for job in self._queue if not job.result.done()])  # without the cancelled
        sizes = [job.image.num_tokens for job in waiting[:MAX_BATCH_IMAGES]]
        settings = self._context.settings
        num_taken = num_to_encode(sizes, settings.max_encode_tokens, self.rate.tokens_per_s / settings.time_scale)
        self._queue = waiting[num_taken:]
        return waiting[:num_taken]

    def _encode(self, batch: list[EncodeJob]) -> list[torch.Tensor | Exception]:
        """On the engine thread."""
        engine = self._context.engine
        return each_alone(lambda jobs: engine.encode([job.image for job in jobs], [job.pixels for job in jobs]), batch)
