"""Which instance gets the next piece of work: one function per stage, each a choice with its reason. Pure.

The caller leaves out instances that may not be chosen; None means that there is no candidate. Ties go to the smallest
instance id, so that equal views give equal choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.shared.messages import InstanceId
from triptych.shared.policies.views import StageView


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen instance, and why, in words for logs and traces."""

    instance_id: InstanceId
    reason: str


def choose_preprocess(candidates: Sequence[StageView]) -> Choice | None:
    """The instance with fewest images to decode. Ours: ModServe colocates preprocessing with the image instance."""
    return _least(candidates, lambda view: view.num_requests, "images waiting")


def choose_encoder(candidates: Sequence[StageView]) -> Choice | None:
    """The instance with fewest pending image tokens, chosen for each image alone, so that the images of one request are
    encoded in parallel (ModServe, modality-aware routing)."""
    return _least(candidates, lambda view: view.num_pending_tokens, "pending image tokens")


def choose_prefill(candidates: Sequence[StageView]) -> Choice | None:
    """The instance with fewest pending prompt tokens, image tokens included, chosen when the images are ready (ModServe,
    modality-aware routing with late binding, the rule for decoder-only models)."""
    return _least(candidates, lambda view: view.num_pending_tokens, "pending prompt tokens")


def choose_decode(candidates: Sequence[StageView], num_blocks: int, prefill_id: InstanceId) -> Choice | None:
    """The prefill's own instance where it decodes too and is not full (it holds the KV: nothing is transferred, and only
    what is generated needs blocks); else, of those with room for num_blocks (of all, when none has), the one with fewest
    tokens in context. Ours: neither paper gives a rule.
    """
    if any(view.instance_id == prefill_id and view.num_free_blocks > 0 for view in candidates):
        return Choice(prefill_id, "holds the KV already")
    roomy = [view for view in candidates if view.num_free_blocks >= num_blocks]
    return _least(roomy or candidates, lambda view: view.num_pending_tokens, "tokens in context")


def _least(candidates: Sequence[StageView], load: Callable[[StageView], int], unit: str) -> Choice | None:
    if not candidates:
        return None
    best = min(candidates, key=lambda view: (load(view), view.num_requests, view.instance_id))
    return Choice(best.instance_id, f"fewest {unit}: {load(best)} of {len(candidates)} candidates")
