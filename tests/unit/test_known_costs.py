"""Where what is known of costs comes from; which profiles are refused: scaler/test_elastic_settings.py."""

from __future__ import annotations

import pytest

from triptych.shared.known_costs import known_transfers, profiled
from triptych.shared.policies.transfers import Transfers
from triptych.shared.settings import Settings


def test_nothing_is_known_of_real_engines_without_a_profile() -> None:
    assert profiled(Settings(model="m")) is None
    assert known_transfers(Settings(model="m")) == Transfers()


def test_emulated_links_are_known() -> None:
    def kv_token_s(**given: object) -> float:
        return known_transfers(Settings(emulate="a100", model="llama-3.2-11b", **given)).kv.token_s  # type: ignore[arg-type]

    assert kv_token_s(emulate_link="tcp") == pytest.approx(25 * kv_token_s(), rel=0.01)
    assert kv_token_s(time_scale=5.0) == pytest.approx(kv_token_s() / 5)
