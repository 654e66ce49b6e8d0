"""How one image is divided among encoders, where the vision tower encodes its pieces (tiles) each for itself. Pure; each share
with its reason. Ours: both papers encode the images of a request in parallel, neither of them the pieces of one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.shared.messages import InstanceId
from triptych.shared.policies.pace import Pace
from triptych.shared.policies.views import StageView

MAX_SHARES = 8  # chosen: as many holders of an image as the cache index remembers
STEP_S = 0.01  # chosen: 5 ms of a vision tower's step on an A100 whatever its size (cost_model), messages, the pixels once more
MIN_GAIN_SHARE = 0.1  # chosen: less is within what the paces of instances, and so these predictions, are wrong by


@dataclass(frozen=True, slots=True)
class DivisibleImage:
    """num_pieces of piece_tokens each. prompt_at: where its prompt will probably be computed; encoded there, they need not
    travel for transfer_s."""

    num_pieces: int
    piece_tokens: int
    prompt_at: InstanceId | None = None
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """What one instance encodes of an image: num_pieces, after those of the shares before it."""

    instance_id: InstanceId
    num_pieces: int
    reason: str


Sharding = Callable[[Sequence[StageView], DivisibleImage], Sequence[Share]]
"""The shares of an image, in order; none: it stays whole."""


def undivided(candidates: Sequence[StageView], image: DivisibleImage) -> Sequence[Share]:
    """As in all other systems."""
    return ()


def by_finish(candidates: Sequence[StageView], image: DivisibleImage) -> Sequence[Share]:
    """Piece by piece to whoever is then done with it first, given what waits there, so that all are done at about the same time
    and busy ones get few or none; if that is sooner than any instance would be alone. A step more costs an encoder STEP_S, for
    itself and for each request that waits there. Whoever is done first gets the first pieces: a prompt goes on with them."""
    if len(candidates) < 2 or image.num_pieces < 2:
        return ()
    pace = Pace.of(candidates)
    loads = [_Load(view, pace, image) for view in candidates]
    alone_s = min(load.ready_s(image.num_pieces) for load in loads)
    nearest = heapq.nsmallest(MAX_SHARES, loads, key=lambda load: (load.ready_s(1), load.view.instance_id))
    for _ in range(image.num_pieces):
        load = min(nearest, key=lambda load: (load.ready_s(load.num_pieces + 1), load.view.instance_id))
        load.num_pieces += 1
    used = sorted((load for load in nearest if load.num_pieces), key=lambda load: load.ready_s(load.num_pieces))
    ready_s = used[-1].ready_s(used[-1].num_pieces)
    if len(used) < 2 or ready_s > (1 - MIN_GAIN_SHARE) * alone_s:
        return ()
    gain = f"divided among {len(used)} of {len(candidates)} candidates: {ready_s:.3f} s, alone {alone_s:.3f} s"
    return [
        Share(load.view.instance_id, load.num_pieces, f"{load.num_pieces} of {image.num_pieces} pieces, {gain}")
        for load in used
    ]


@dataclass(slots=True, eq=False)
class _Load:
    """What one candidate gets."""

    view: StageView
    pace: Pace
    image: DivisibleImage
    num_pieces: int = 0

    def ready_s(self, num_pieces: int) -> float:
        """When so many pieces would be where the prompt is, with all others that arrive there at that time."""
        view, image = self.view, self.image
        is_there = view.instance_id == image.prompt_at
        transfer_s = 0.0 if is_there else image.transfer_s
        return STEP_S * (1 + view.num_requests) + self.pace.finish_s(view, num_pieces * image.piece_tokens) + transfer_s
