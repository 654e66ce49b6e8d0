"""Staffing over `tides` in the small simulated cluster (support/elastic_world.py): ours beside the monolith that is scaled by
the same rule. InternVL2.5-26B on A100s, starts of 46 s; nobody is told targets, as in `bench autoscale`. Slacks were chosen
with seeds 11 to 14; this is another one.
"""

from __future__ import annotations

import pytest

from support.elastic_world import Arrival, Outcome, Setup, World, layout
from triptych.loadgen.synth.rows import workload_rows
from triptych.loadgen.synth.workload import load_workload
from triptych.shared.cost_model.published import published_cost_model
from triptych.shared.policies.elastic.actions import Drain, Launch
from triptych.shared.policies.elastic.views import Limits
from triptych.shared.policies.policy_set import policy_set

LAYOUTS = {"triptych": "text: text; multimodal: prompt*2", "monolith": "instance*4"}
MAX_RATIO = 0.85


def outcome(policy: str) -> Outcome:
    """Prints what it gives."""
    policies, workload = policy_set(policy), load_workload("tides")
    setup = Setup(
        published_cost_model("a100", "internvl2.5-26b"),
        list(layout(LAYOUTS[policy])),
        policies.routing,
        policies.queue_order,
        policies.elasticity,
        Limits(2, 32),
        policies.sharding,
        image_size=(900, 600),  # seven tiles, as the bench's pictures have on average
        max_prefill_tokens=2048,
        has_targets=False,
    )
    arrivals = [
        Arrival(
            row.arrival_s, row.num_context_tokens - (row.num_image_tokens or 0), max(2, row.num_output_tokens), row.num_images
        )
        for row in workload_rows(workload)
    ]
    seen = World(setup).run(arrivals, workload.duration_s)
    print(f"simulated tides: {policy} {seen.attainment:.2%} in time, {seen.instance_seconds:.0f} instance seconds")
    return seen


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ours_takes_fewer_instance_seconds_than_a_monolith_scaled_alike() -> None:
    ours, monolith = outcome("triptych"), outcome("monolith")
    assert ours.attainment >= 0.99
    assert ours.instance_seconds <= MAX_RATIO * monolith.instance_seconds
    for seen in (ours, monolith):
        assert all(running.ended_s is not None for running in seen.requests)
        launched = sum(one.action.count for _, one in seen.decisions if isinstance(one.action, Launch))
        drained = sum(isinstance(one.action, Drain) for _, one in seen.decisions)
        assert 5 <= drained <= launched + 2, "it follows the tides, and not every wave"
        assert launched <= 40
