"""The rows of a workload: each client draws its own, in order of time, and they are merged. The same seed, the same rows."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from random import Random
from statistics import NormalDist

from triptych.loadgen.synth.arrivals import Arrivals, constant, gamma_levels, held, normal_levels, of_bursts, of_hours, together
from triptych.loadgen.synth.tables import Sizes
from triptych.loadgen.synth.workload import Client, Conversation, Workload, counts_of, sizes_of
from triptych.loadgen.traces.row import TraceRow

BLOCK_SIZE = 16  # tokens of a prefix block, as vLLM's default
MAX_REMEMBERED = 1000  # requests whose pictures may come again; chosen, as `loadgen replay` has it
CLIENT_SHIFT, CONVERSATION_SHIFT = 44, 20  # bits of a block's name: 4 client, 24 conversation, 20 block
_uniform = NormalDist().cdf


def workload_rows(workload: Workload) -> Iterator[TraceRow]:
    clients = [_ClientRows(workload, client, number).rows() for number, client in enumerate(workload.client)]
    return heapq.merge(*clients, key=lambda row: row.arrival_s)


class _ClientRows:
    """One client's draws."""

    def __init__(self, workload: Workload, client: Client, number: int) -> None:
        self._workload, self._client, self._number = workload, client, number
        self._rng = Random(f"{workload.seed} {client.name}")
        self._counts = None if client.images is None else counts_of(client.images)
        self._output = sizes_of(client.output_tokens)
        self._text = sizes_of(client.context_tokens or client.text_tokens or {})
        self._image = None if client.image_tokens is None else sizes_of(client.image_tokens)
        talk = client.conversation or Conversation(turns={50: 1}, think_s={50: 1})
        self._talk, self._num_turns, self._think_s = talk, Sizes(talk.turns), Sizes(talk.think_s)
        self._reuse_rng = Random(f"{workload.seed} {client.name} pictures")
        self._image_ids = count(number << CLIENT_SHIFT)
        self._with_new_images: deque[TraceRow] = deque(maxlen=MAX_REMEMBERED)

    def rows(self) -> Iterator[TraceRow]:
        pending: list[tuple[float, int, TraceRow]] = []  # turns of conversations that began
        order, conversations = count(), count(1)
        for start_s, images_factor, surge in self._starts():
            while pending and pending[0][0] <= start_s:
                yield heapq.heappop(pending)[2]
            first = self._request(start_s, images_factor, surge)
            if self._client.conversation is None:
                yield first
                continue
            for row in self._turns(first, next(conversations)):
                heapq.heappush(pending, (row.arrival_s, next(order), row))
        yield from (row for arrival_s, _, row in sorted(pending) if arrival_s < self._workload.duration_s)

    def _starts(self) -> Iterator[tuple[float, float, float]]:
        """When requests or conversations begin, with the factor of their pictures and the surge that goes on."""
        client, workload, rng = self._client, self._workload, self._rng
        swing, surge = constant(1.0), constant(0.0)
        if client.swing:
            swing = held(gamma_levels(client.swing, rng), client.swing_s, rng)
        if client.surge:
            surge = held(normal_levels(rng), client.surge_s, rng)
        bursts = (of_bursts(client.burst, lambda burst: burst.rate), of_bursts(client.burst, lambda burst: burst.images))
        arrivals = Arrivals(client.cv, rng)
        for end_s, (hour, level, burst, images, common) in together(of_hours(client, workload), swing, *bursts, surge):
            for time_s in arrivals.until(min(end_s, workload.duration_s), client.rate_per_s * hour * level * burst):
                yield time_s, images, common
            if end_s >= workload.duration_s:
                return

    def _request(self, arrival_s: float, images_factor: float, surge: float) -> TraceRow:
        """The number of pictures and the context follow two normal variables that correlate."""
        client, rng = self._client, self._rng
        normal = math.sqrt(client.surge) * surge + math.sqrt(1 - client.surge) * rng.gauss(0, 1)
        num_images = max(1, round(self._counts.at(_uniform(normal)) * images_factor)) if self._counts else 0
        follows = client.context_follows_images
        context = self._text.at(_uniform(follows * normal + math.sqrt(1 - follows**2) * rng.gauss(0, 1)))
        num_image_tokens = None
        if client.context_tokens is None:
            num_image_tokens = sum(self._image.at(rng.random()) for _ in range(num_images)) if self._image else 0
        row = TraceRow(
            arrival_s,
            context + (num_image_tokens or 0),
            self._output.at(rng.random()),
            num_images=num_images,
            num_image_tokens=num_image_tokens,
        )
        return self._with_named_images(row) if client.image_reuse else row

    def _with_named_images(self, row: TraceRow) -> TraceRow:
        """New pictures with names, or all those of an earlier row. Drawn apart: the rest is as it were without."""
        if self._with_new_images and self._reuse_rng.random() < self._client.image_reuse:
            known = self._reuse_rng.choice(self._with_new_images)
            return replace(
                row,
                num_context_tokens=row.num_context_tokens - (row.num_image_tokens or 0) + (known.num_image_tokens or 0),
                num_images=known.num_images,
                num_image_tokens=known.num_image_tokens,
                image_ids=known.image_ids,
            )
        row = replace(row, image_ids=tuple(islice(self._image_ids, row.num_images)))
        self._with_new_images.append(row)
        return row

    def _turns(self, first: TraceRow, number: int) -> Iterator[TraceRow]:
        """Each prompt holds all that was said before; its blocks have the names that they had then. Pictures count once."""
        rng, arrival_s = self._rng, first.arrival_s
        context, output = self._talk.system_tokens + first.num_context_tokens, first.num_output_tokens
        for turn in range(self._num_turns.at(rng.random())):
            if context > self._talk.max_context_tokens:
                return
            yield TraceRow(
                arrival_s,
                context,
                output,
                num_images=0 if turn else first.num_images,
                num_image_tokens=0 if turn else first.num_image_tokens,
                image_ids=() if turn else first.image_ids,
                session=f"{self._client.name}-{number}",
                turn=turn,
                prefix_ids=self._blocks(context, number),
                prefix_block_size=BLOCK_SIZE,
            )
            arrival_s += self._think_s.at(rng.random())
            context += output + self._text.at(rng.random())
            output = self._output.at(rng.random())

    def _blocks(self, context_tokens: int, conversation: int) -> tuple[int, ...]:
        """Blocks of the system prompt belong to conversation 0, which all share."""
        shared = self._talk.system_tokens // BLOCK_SIZE
        base = self._number << CLIENT_SHIFT
        own = base | conversation << CONVERSATION_SHIFT
        return tuple((base if block < shared else own) | block for block in range(context_tokens // BLOCK_SIZE))
