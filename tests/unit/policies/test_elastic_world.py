"""Strategies in a small simulated cluster (support/elastic_world.py, no calibrated simulator) against static splits.

Goodput under a mix that drifts and one that does not, and how often roles change. One seed, eight A100s, InternVL2.5-26B.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict

import pytest

from support.elastic_mixes import Phase, arrivals
from support.elastic_world import Outcome, Setup, World
from triptych.shared.cost_model.published import published_cost_model
from triptych.shared.policies.elastic.views import Limits
from triptych.shared.policies.placement import ROLES_OF
from triptych.shared.policies.policy_set import policy_set

STATIC = ("split_text_first", "split_equal", "split_multimodal_first")
MIXES = {
    "drift": (Phase(60, 11, 0.2), Phase(60, 2, 2.0, 60), Phase(60, 2, 0.2), Phase(60, 4, 0.3, 500)),
    "stationary": (Phase(240, 5.5, 1.0),),
}


@functools.cache
def outcome(policy: str, mix: str, seed: int = 1) -> Outcome:
    """Prints what it gives."""
    policies, phases = policy_set(policy), MIXES[mix]
    counts = policies.placement.counts(8)
    groups = policies.placement.groups(counts)
    layout = [(frozenset(ROLES_OF[kind]), group) for kind in counts for group in groups[kind]]
    cost = published_cost_model("a100", "internvl2.5-26b")
    setup = Setup(cost, layout, policies.routing, policies.queue_order, policies.elasticity, Limits(8, 8))
    seen = World(setup).run(arrivals(phases, seed), sum(phase.seconds for phase in phases))
    print(f"simulated, {mix}: {policy} {seen.goodput_per_s:.2f}/s, {seen.attainment:.1%}, {len(seen.switches)} switches")
    return seen


@pytest.mark.parametrize(("policy", "factor"), [("triptych", 1.5), ("elasticmm", 1.2)])
def test_under_a_drifting_mix_more_is_in_time_than_with_any_static_split(policy: str, factor: float) -> None:
    best = max(outcome(name, "drift").goodput_per_s for name in STATIC)
    assert outcome(policy, "drift").goodput_per_s >= factor * best


@pytest.mark.parametrize("policy", ["triptych", "elasticmm"])
def test_under_a_steady_mix_nothing_is_lost(policy: str) -> None:
    best = max(outcome(name, "stationary").goodput_per_s for name in STATIC)
    assert outcome(policy, "stationary").goodput_per_s >= 0.97 * best


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("policy", ["triptych", "elasticmm"])
def test_every_request_ends_and_no_instance_flips_back_at_once(policy: str, mix: str) -> None:
    seen = outcome(policy, mix)
    assert all(running.ended_s is not None for running in seen.requests)
    switched: dict[str, list[float]] = defaultdict(list)
    for at_s, switch in seen.switches:
        switched[switch.instance_id].append(at_s)
    dwell_s = policy_set(policy).elasticity.hysteresis.dwell_s  # type: ignore[attr-defined]
    for times in switched.values():
        assert all(later - earlier >= dwell_s for earlier, later in itertools.pairwise(times))


def test_pools_change_seldom() -> None:
    assert len(outcome("triptych", "stationary").switches) <= 6
    assert len([at_s for at_s, _ in outcome("triptych", "stationary").switches if at_s > 120]) <= 2
