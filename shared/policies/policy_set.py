"""A policy set: how a cluster places, routes, queues, overlaps and caches, as data. Router, stages, launcher and simulator go
by the same objects; nothing asks for a set's name.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from triptych.shared.errors import BadRequest
from triptych.shared.messages import Role
from triptych.shared.policies.elastic.autoscale import ModServeScaling
from triptych.shared.policies.elastic.emp import ElasticMMScaling
from triptych.shared.policies.elastic.staffing import WHOLE, Staffing
from triptych.shared.policies.elastic.strategy import Elasticity, Fixed
from triptych.shared.policies.follow_ups import FollowUps
from triptych.shared.policies.overlap import Overlap, by_gain, never
from triptych.shared.policies.placement import Placement
from triptych.shared.policies.queueing import QueueOrder, by_slack, fcfs
from triptych.shared.policies.routing_rules import RoutingRules
from triptych.shared.policies.sharding import Sharding, by_finish, undivided


@dataclass(frozen=True, slots=True)
class CacheRules:
    """What instances keep for later requests: KV of prompt prefixes, embeddings of images."""

    keeps_kv: bool = False
    keeps_embeddings: bool = False

    @property
    def keeps_any(self) -> bool:
        return self.keeps_kv or self.keeps_embeddings


BY_LOAD, NO_CACHE, FIXED = RoutingRules(), CacheRules(), Fixed()


@dataclass(frozen=True, slots=True)
class PolicySet:
    """elasticity: how roles, groups and numbers of instances follow the load."""

    placement: Placement
    routing: RoutingRules = BY_LOAD
    queue_order: QueueOrder = fcfs
    overlap: Overlap = never
    sharding: Sharding = undivided
    cache: CacheRules = NO_CACHE
    elasticity: Elasticity = FIXED


ALL_STAGES: frozenset[Role] = frozenset(("encoder", "prefill", "decode"))
ENCODES_WHERE_IT_PREFILLS = RoutingRules(coupled=frozenset(("encoder", "prefill")))
COUPLED_BY_GROUP = replace(ENCODES_WHERE_IT_PREFILLS, has_groups=True)
UNIFIED = CacheRules(keeps_kv=True, keeps_embeddings=True)
BY_GROUP = RoutingRules(has_groups=True)
# Chosen: half of a prefill step, not far beyond the tipping point of GPUs, below which tokens cost a pass little (Qwen2.5-VL-7B
# by published figures: 140 on an A100, 217 on an H100); nearly all texts of `chat-reuse` are shorter.
FOLLOW_UPS = FollowUps(max_tokens=256)
COLOCATED = Placement({"instance": 1})
PROMPT_DECODE = Placement({"prompt": 0.5, "decode": 0.5})  # encoding is a part of prefill, as in DistServe's split
STAGES = Placement({"encoder": 0.25, "prefill": 0.25, "decode": 0.5})
IMAGE_TEXT = Placement({"text": 0.5, "encoder": 0.5})  # ModServe: image instances, and text instances that also decode
# Long steps, of pictures, are kept from where text is decoded and mostly prefilled: a first token of text is due before such a
# step is over. Simulated under `bursts`: with a quarter for text nearly all of it is in time, with more pictures are late
PICTURES_APART = Placement({"prompt": 0.75, "text": 0.25}, for_text="text")
# Groups of instances for text and for pictures (ElasticMM); of eight instances five, four and two are for text.
TEXT_FIRST = Placement({"encoder": 0.125, "prefill": 0.375, "decode": 0.5}, text_share=0.7)
EQUAL = Placement({"encoder": 0.25, "prefill": 0.375, "decode": 0.375}, text_share=0.6)
MULTIMODAL_FIRST = Placement({"encoder": 0.5, "prefill": 0.25, "decode": 0.25}, text_share=0.5)
COUPLED_EQUAL = Placement(PROMPT_DECODE.shares, text_share=0.5)

TRIPTYCH = PolicySet(
    PICTURES_APART,
    RoutingRules(has_groups=True, follow_ups=FOLLOW_UPS),
    queue_order=by_slack,
    overlap=by_gain,
    sharding=by_finish,
    cache=UNIFIED,
    elasticity=Staffing(),
)
POLICY_SETS = {
    # coupled servers as they are today: caches of their own, first come first served, one of them for a whole request
    "monolith_rr": PolicySet(COLOCATED, RoutingRules(coupled=ALL_STAGES, is_in_turn=True), cache=UNIFIED),
    "monolith": PolicySet(COLOCATED, RoutingRules(coupled=ALL_STAGES), cache=UNIFIED, elasticity=Staffing(WHOLE, fixed=WHOLE)),
    "pd_static": PolicySet(PROMPT_DECODE, ENCODES_WHERE_IT_PREFILLS),
    "static": PolicySet(STAGES),
    # ModServe's ablations: stages apart; then scheduled by their SLOs; then routed by their load
    "modserve_decoup": PolicySet(IMAGE_TEXT, RoutingRules(is_in_turn=True), elasticity=ModServeScaling()),
    "modserve_sched": PolicySet(IMAGE_TEXT, RoutingRules(is_in_turn=True), by_slack, elasticity=ModServeScaling()),
    "modserve": PolicySet(IMAGE_TEXT, queue_order=by_slack, elasticity=ModServeScaling()),
    # its baselines: groups and stages whose instances stay what they are
    "split_text_first": PolicySet(TEXT_FIRST, BY_GROUP, cache=UNIFIED),
    "split_equal": PolicySet(EQUAL, BY_GROUP, cache=UNIFIED),
    "split_multimodal_first": PolicySet(MULTIMODAL_FIRST, BY_GROUP, cache=UNIFIED),
    # ElasticMM's: encoding blocks prefill; then what is cached is not computed; then encoders of their own
    "elasticmm_emp": PolicySet(COUPLED_EQUAL, COUPLED_BY_GROUP, elasticity=ElasticMMScaling(is_coupled=True)),
    "elasticmm_unicache": PolicySet(
        COUPLED_EQUAL, COUPLED_BY_GROUP, cache=UNIFIED, elasticity=ElasticMMScaling(is_coupled=True)
    ),
    "elasticmm": PolicySet(EQUAL, replace(BY_GROUP, follow_ups=FOLLOW_UPS), cache=UNIFIED, elasticity=ElasticMMScaling()),
    # ours, and without each: overlap, shards of images, cache (and what goes by it), follow-ups, roles that change
    "triptych": TRIPTYCH,
    "triptych_barrier": replace(TRIPTYCH, overlap=never),
    "triptych_undivided": replace(TRIPTYCH, sharding=undivided),
    "triptych_uncached": replace(TRIPTYCH, routing=BY_GROUP, cache=NO_CACHE),
    "triptych_handed_over": replace(TRIPTYCH, routing=BY_GROUP),
    "triptych_fixed": replace(TRIPTYCH, elasticity=FIXED),
}


def policy_set(name: str) -> PolicySet:
    """A preset.

    Raises:
        BadRequest: there is none of that name; the message names all.
    """
    if name in POLICY_SETS:
        return POLICY_SETS[name]
    close = difflib.get_close_matches(name, POLICY_SETS, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise BadRequest(f"there is no policy {name!r}{hint}; there are {', '.join(POLICY_SETS)}", code="bad_setting")
