"""What all requests of a router's HTTP side share, and where their CPU time is spent."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from triptych.services.router.asks import Bounds, Model
from triptych.services.router.client_link import BodyStore
from triptych.services.router.job import Parts
from triptych.services.router.record import Phase, RequestRecord
from triptych.services.router.token_texts import TokenTexts
from triptych.shared.errors import BadRequest, Overloaded
from triptych.shared.messages import FinishReason
from triptych.shared.settings import Settings

PREPARE_TIMEOUT_S = 10.0  # chosen: a prompt of 100 000 tokens takes under a second to render and tokenize
SHORT_BYTES = 4096  # measured: 8 ms when it spells nothing but special tokens, 0.3 ms usually; a thread costs 0.5 ms

T = TypeVar("T")
Read = Callable[[bytes, Model, Bounds], T]


@dataclass(frozen=True, slots=True)
class Edge:
    """admit: called when a request's body is there; raises Overloaded when too many are inside. on_end: (the records of
    all choices, status, finish_reason, phase before the end), called exactly once for each request, admitted or not. Status,
    reason and phase are the first choice's."""

    settings: Settings
    model: Model
    texts: TokenTexts
    parts: Parts
    workers: Executor
    bodies: BodyStore
    admit: Callable[[RequestRecord], None]
    on_end: Callable[[Sequence[RequestRecord], int, FinishReason | None, Phase], None]

    async def read(self, read: Read[T], body: bytes) -> T:
        """As `in_worker`, but a short body is read here and now: a thread would cost more than the reading."""
        return read(body, self.model, self._bounds()) if len(body) <= SHORT_BYTES else await self.in_worker(read, body)

    async def in_worker(self, read: Read[T], body: bytes) -> T:
        """read(body, ...) in a worker thread: parsing, rendering and tokenizing may take long.

        Raises:
            Overloaded: it did not begin soon enough to blame it; BadRequest: it did, and took too long.
        """
        begun_at_s = math.inf
        bounds = self._bounds()

        def work() -> T:
            nonlocal begun_at_s
            begun_at_s = time.monotonic()
            return read(body, self.model, bounds)

        call = self.workers.submit(work)
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                return await asyncio.wrap_future(call)
        except TimeoutError:
            if call.cancel() or time.monotonic() - begun_at_s < PREPARE_TIMEOUT_S / 2:
                raise Overloaded("too many prompts wait to be tokenized; try again later") from None
            raise BadRequest("the prompt takes too long to tokenize; make it shorter") from None

    def _bounds(self) -> Bounds:
        return Bounds(self.settings, self.parts.limits.max_model_len())

    async def off_loop(self, work: Callable[[], T]) -> T:
        """work() in a worker thread: it may take seconds."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)
