"""Which instance gets the next piece of work: one function per stage, each a choice with its reason. Pure.

The caller leaves out instances that may not be chosen; None means that there is no candidate. Ties go to the smallest
instance id, so that equal views give equal choices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from triptych.shared.messages import InstanceId
from triptych.shared.policies.pace import Pace
from triptych.shared.policies.views import StageView

View = TypeVar("View", bound=StageView)


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """What it costs to get something for each of some tokens from a peer, in seconds: fixed_s, and token_s for each token."""

    fixed_s: float
    token_s: float

    def transfer_s(self, num_tokens: int) -> float:
        return self.fixed_s + self.token_s * num_tokens


# Chosen, where no cost model tells (transfers.py): a few messages, of 0.3 ms each on one machine, and 1 GB/s, one TCP
# connection, for the bytes of Qwen2.5-VL-7B: KV of 57,344 a token, embeddings of 7,168.
KV_COSTS = TransferCosts(0.002, 60e-6)
EMBEDDING_COSTS = TransferCosts(0.001, 7e-6)

MIN_DISTURBED_S = 0.1  # chosen: what a short prompt costs images, decoding included where that happens


@dataclass(frozen=True, slots=True)
class ImageWork:
    """One image to encode. holders: instances that hold its embeddings. prompt_at: where its prompt will probably be computed;
    encoded there, they need not travel for transfer_s."""

    num_tokens: int
    holders: Collection[InstanceId] = ()
    prompt_at: InstanceId | None = None
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptWork:
    """One prompt to compute: num_tokens in all (text tokens only where images are seen by cross-attention), num_blocks KV
    blocks. prefixes: by holder, how many of its first tokens have their KV there; at least one token is always computed.
    kv_costs: of getting KV from a holder; None: it is never pulled. saved_s: by instance, what transfers of embeddings are
    saved there."""

    num_tokens: int
    num_blocks: int = 0
    prefixes: Mapping[InstanceId, int] = field(default_factory=dict)
    kv_costs: TransferCosts | None = None
    saved_s: Mapping[InstanceId, float] = field(default_factory=dict)

    def num_usable(self, holder: InstanceId) -> int:
        """Tokens that need no computing where that holder's KV is."""
        return max(0, min(self.prefixes.get(holder, 0), self.num_tokens - 1))

    @property
    def kv_s(self) -> float:
        """Until its KV has moved to where it is decoded."""
        return 0.0 if self.kv_costs is None else self.kv_costs.transfer_s(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen instance, and why, in words for logs and traces. num_cached_tokens: of the work, that need no computing
    there. pull_from: the peer that holds them, when they are to be pulled. cost_s: of a prompt, its first token from now, what
    others wait for it, and the way of its KV."""

    instance_id: InstanceId
    reason: str
    num_cached_tokens: int = 0
    pull_from: InstanceId | None = None
    cost_s: float = 0.0


def choose_preprocess(candidates: Sequence[StageView]) -> Choice | None:
    """The instance with fewest images to decode. Ours: ModServe colocates preprocessing with the image instance."""
    if not candidates:
        return None
    best = min(candidates, key=lambda view: (view.num_requests, view.instance_id))
    return Choice(best.instance_id, f"fewest images waiting: {best.num_requests} of {len(candidates)} candidates")


def choose_encoder(candidates: Sequence[StageView], image: ImageWork) -> Choice | None:
    """The least busy of those that hold the embeddings: nothing is computed. Else the instance from which they would be there
    first, by its pending image tokens; for each image alone, so that the images of one request are encoded in parallel
    (ModServe, modality-aware routing, which counts tokens where this counts their seconds). That it may be where the prompt
    goes makes disaggregation a choice for each image: elsewhere only when that is sooner, transfer included (ours)."""
    if not candidates:
        return None
    holding = [view for view in candidates if view.instance_id in image.holders]
    if holding:
        best = min(holding, key=lambda view: (view.num_requests, view.instance_id))
        return Choice(best.instance_id, f"holds the embeddings, as {len(holding)} candidates do", image.num_tokens)
    pace = Pace.of(candidates)

    def there_s(view: StageView) -> float:
        return pace.finish_s(view, image.num_tokens) + (0.0 if view.instance_id == image.prompt_at else image.transfer_s)

    best = min(candidates, key=lambda view: (there_s(view), *_tie(view)))
    where = " where the prompt goes" if best.instance_id == image.prompt_at else ""
    waiting = f"{best.num_pending_tokens} pending image tokens, {there_s(best):.3f} s"
    return Choice(best.instance_id, f"done first of {len(candidates)} candidates{where}: {waiting}")


def choose_prefill(candidates: Sequence[StageView], prompt: PromptWork) -> Choice | None:
    """The instance whose first token would come first, by its pending prompt tokens and what it has to compute of this prompt,
    chosen when the images are ready (ModServe, modality-aware routing with late binding). Cached KV counts where it saves
    time, pulled from a peer too: so a holder that is busy is left for an idle instance, and affinity never waits longer than
    the least loaded would. An instance that encodes is taken when that saves more time than it takes from the images there
    (ours): such instances turn into encoders while pictures come in bursts. So is one that does not decode when that saves more
    than it takes to move the KV. Of those with blocks for the prompt, if any."""
    if not candidates:
        return None
    pace = Pace.of(candidates)
    plans = [_plan(view, prompt, pace) for view in _with_room(candidates, prompt.num_blocks)]
    best = min(plans, key=lambda plan: (plan.cost_s, *_tie(plan.view)))
    reason = best.reason(len(candidates))
    return Choice(best.view.instance_id, reason, best.num_cached_tokens, best.pull_from, best.cost_s)


def choose_decode(candidates: Sequence[StageView], num_blocks: int, prefill_id: InstanceId) -> Choice | None:
    """The prefill's own instance where it decodes too, is not full (it holds the KV: nothing is transferred, and only what is
    generated needs blocks), and has no images to encode, which take as long as many tokens; else, of those without images and
    with room for num_blocks (of all, when none is), the one with fewest tokens in context. Ours: neither paper gives a rule.
    """
    if not candidates:
        return None
    calm = [view for view in candidates if not view.has_images] or candidates
    if any(view.instance_id == prefill_id and view.num_free_blocks > 0 for view in calm):
        return Choice(prefill_id, "holds the KV already")
    best = min(_with_room(calm, num_blocks), key=lambda view: (view.num_pending_tokens, *_tie(view)))
    return Choice(best.instance_id, f"fewest tokens in context: {best.num_pending_tokens} of {len(candidates)} candidates")


def in_turn(candidates: Sequence[StageView], turn: int) -> Choice | None:
    """Round robin: the turn-th of the candidates, again and again."""
    if not candidates:
        return None
    ids = sorted(view.instance_id for view in candidates)
    return Choice(ids[turn % len(ids)], f"its turn among {len(ids)} candidates")


@dataclass(frozen=True, slots=True)
class _Plan:
    """One candidate, and what would happen there. first_token_s: from now. disturbs_s: for how long the images that it encodes
    would wait for this prompt. moves_s: the way of the KV, which the second token waits for."""

    view: StageView
    first_token_s: float
    disturbs_s: float
    moves_s: float
    num_cached_tokens: int
    pull_from: InstanceId | None

    @property
    def cost_s(self) -> float:
        return self.first_token_s + self.disturbs_s + self.moves_s

    def reason(self, num_candidates: int) -> str:
        cached = f", {self.num_cached_tokens} cached" if self.num_cached_tokens else ""
        pulled = f", pulled from {self.pull_from}" if self.pull_from else ""
        waiting = f"{self.view.num_pending_tokens} pending prompt tokens{cached}{pulled}"
        return f"first token first of {num_candidates} candidates: {waiting}, {self.first_token_s:.3f} s"


def _plan(view: StageView, prompt: PromptWork, pace: Pace) -> _Plan:
    """With its own cached KV, or with a peer's longer one where pulling is quicker than computing."""
    tokens_per_s = pace.at(view)
    num_cached, pull_from, pull_s = prompt.num_usable(view.instance_id), None, 0.0
    if prompt.kv_costs is not None and prompt.prefixes:
        peer = max(sorted(prompt.prefixes), key=lambda holder: prompt.prefixes[holder])
        num_more = prompt.num_usable(peer) - num_cached
        peer_s = prompt.kv_costs.transfer_s(num_more)
        if num_more > 0 and peer_s < num_more / tokens_per_s:
            num_cached, pull_from, pull_s = num_cached + num_more, peer, peer_s
    own_s = (prompt.num_tokens - num_cached) / tokens_per_s
    first_token_s = pace.wait_s(view) + own_s + pull_s - prompt.saved_s.get(view.instance_id, 0.0)
    disturbs_s = max(own_s, MIN_DISTURBED_S) if view.has_images else 0.0
    return _Plan(view, first_token_s, disturbs_s, 0.0 if view.decodes else prompt.kv_s, num_cached, pull_from)


def _with_room(candidates: Sequence[View], num_blocks: int) -> Sequence[View]:
    return [view for view in candidates if view.num_free_blocks >= num_blocks] or candidates


def _tie(view: StageView) -> tuple[int, int, InstanceId]:
    """Among equals in time: who has fewer requests, more room."""
    return view.num_requests, -view.num_free_blocks, view.instance_id
