"""The presets, and how instances are shared out among roles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.errors import BadRequest
from triptych.shared.policies.placement import ROLES_OF, Placement
from triptych.shared.policies.policy_set import POLICY_SETS, policy_set


def test_the_names_and_what_a_wrong_one_says() -> None:
    assert list(POLICY_SETS) == [
        "monolith_rr",
        "monolith",
        "pd_static",
        "static",
        "modserve_decoup",
        "modserve_sched",
        "modserve",
        "split_text_first",
        "split_equal",
        "split_multimodal_first",
        "elasticmm_emp",
        "elasticmm_unicache",
        "elasticmm",
        "triptych",
        "triptych_barrier",
        "triptych_undivided",
        "triptych_uncached",
        "triptych_handed_over",
        "triptych_fixed",
    ]
    with pytest.raises(BadRequest, match=r"no policy 'modserv' \(did you mean modserve\?\); there are monolith_rr, .*triptych"):
        policy_set("modserv")


@pytest.mark.parametrize("name", POLICY_SETS)
def test_every_placement_can_serve_pictures(name: str) -> None:
    placement = policy_set(name).placement
    for num_instances in (placement.min_instances, 8, 64):
        roles = {role for kind in placement.counts(num_instances) for role in ROLES_OF[kind]}
        assert roles == {"encoder", "prefill", "decode"}


@pytest.mark.parametrize("name", POLICY_SETS)
def test_coupled_stages_have_an_instance_that_does_them_all(name: str) -> None:
    policies = policy_set(name)
    assert any(policies.routing.coupled <= set(ROLES_OF[kind]) for kind in policies.placement.shares)


def test_eight_instances() -> None:
    assert policy_set("monolith").placement.counts(8) == {"instance": 8}
    assert policy_set("modserve").placement.counts(8) == {"encoder": 4, "text": 4}
    assert policy_set("static").placement.counts(8) == {"encoder": 2, "prefill": 2, "decode": 4}
    assert policy_set("triptych").placement.counts(8) == {"prompt": 6, "text": 2}


shares = st.dictionaries(st.sampled_from(sorted(ROLES_OF)), st.floats(0.05, 1.0), min_size=1)


@given(shares, st.integers(1, 200))
def test_all_instances_are_given_out_by_share(parts: dict[str, float], num_instances: int) -> None:
    placement = Placement(parts)
    if num_instances < len(parts):
        with pytest.raises(BadRequest, match="at least"):
            placement.counts(num_instances)
        return
    counts = placement.counts(num_instances)
    assert sum(counts.values()) == num_instances
    wanted = {kind: num_instances * share / sum(parts.values()) for kind, share in parts.items()}
    assert all(count >= 1 for count in counts.values())
    assert all(counts[kind] < max(wanted[kind], 1) + 1 for kind in parts)
