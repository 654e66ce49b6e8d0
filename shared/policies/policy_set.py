"""A policy set: how a cluster places, routes, queues, overlaps and caches, as data. Router, stages, launcher and simulator go
by the same objects; nothing asks for a set's name.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from triptych.shared.errors import BadRequest
from triptych.shared.messages import Role
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


BY_LOAD, NO_CACHE = RoutingRules(), CacheRules()


@dataclass(frozen=True, slots=True)
class PolicySet:
    """elasticity: instances keep the roles that they started with."""

    placement: Placement
    routing: RoutingRules = BY_LOAD
    queue_order: QueueOrder = fcfs
    overlap: Overlap = never
    sharding: Sharding = undivided
    cache: CacheRules = NO_CACHE
    elasticity: Literal["none"] = "none"


ALL_STAGES: frozenset[Role] = frozenset(("encoder", "prefill", "decode"))
ENCODES_WHERE_IT_PREFILLS = RoutingRules(coupled=frozenset(("encoder", "prefill")))
UNIFIED = CacheRules(keeps_kv=True, keeps_embeddings=True)
COLOCATED = Placement({"instance": 1})
PROMPT_DECODE = Placement({"prompt": 0.5, "decode": 0.5})  # encoding is a part of prefill, as in DistServe's split
STAGES = Placement({"encoder": 0.25, "prefill": 0.25, "decode": 0.5})
IMAGE_TEXT = Placement({"text": 0.5, "encoder": 0.5})  # ModServe: image instances, and text instances that also decode
SHARED_TEXT = Placement({"instance": 0.5, "text": 0.5})  # half encode only when there is something to encode

TRIPTYCH = PolicySet(SHARED_TEXT, queue_order=by_slack, overlap=by_gain, sharding=by_finish, cache=UNIFIED)
POLICY_SETS = {
    # coupled servers as they are today: caches of their own, first come first served, one of them for a whole request
    "monolith_rr": PolicySet(COLOCATED, RoutingRules(coupled=ALL_STAGES, is_in_turn=True), cache=UNIFIED),
    "monolith": PolicySet(COLOCATED, RoutingRules(coupled=ALL_STAGES), cache=UNIFIED),
    "pd_static": PolicySet(PROMPT_DECODE, ENCODES_WHERE_IT_PREFILLS),
    "static": PolicySet(STAGES),
    # ModServe's ablations: stages apart; then scheduled by their SLOs; then routed by their load
    "modserve_decoup": PolicySet(IMAGE_TEXT, RoutingRules(is_in_turn=True)),
    "modserve_sched": PolicySet(IMAGE_TEXT, RoutingRules(is_in_turn=True), by_slack),
    "modserve": PolicySet(IMAGE_TEXT, queue_order=by_slack),
    # ElasticMM's: encoding blocks prefill; then what is cached is not computed; then encoders of their own
    "elasticmm_emp": PolicySet(PROMPT_DECODE, ENCODES_WHERE_IT_PREFILLS),
    "elasticmm_unicache": PolicySet(PROMPT_DECODE, ENCODES_WHERE_IT_PREFILLS, cache=UNIFIED),
    "elasticmm": PolicySet(STAGES, cache=UNIFIED),
    # ours, and without each: overlap, shards of images, cache
    "triptych": TRIPTYCH,
    "triptych_barrier": replace(TRIPTYCH, overlap=never),
    "triptych_undivided": replace(TRIPTYCH, sharding=undivided),
    "triptych_uncached": replace(TRIPTYCH, cache=NO_CACHE),
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
