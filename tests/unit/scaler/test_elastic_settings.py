"""Settings of elasticity that contradict each other are told in one line, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from triptych.services.scaler.elastic_settings import check_elastic, known_costs, with_limits
from triptych.shared.checkpoint import open_checkpoint
from triptych.shared.cost_model.forms import MemoryCosts, PassCosts, PassWork
from triptych.shared.cost_model.profile import (
    VERSION,
    FitError,
    Machine,
    Profile,
    ProfiledModel,
    StageProfile,
    TimedPass,
    write_profile,
)
from triptych.shared.errors import BadRequest
from triptych.shared.settings import Settings

DEMO = Path(__file__).resolve().parents[3] / "deploy" / "demo" / "checkpoint"
EMULATED: dict[str, Any] = {"emulate": "a100", "model": "llama-3.2-11b"}


@pytest.mark.parametrize(
    ("given", "num_instances", "error"),
    [
        ({"policy": "tryptich"}, None, "there is no policy 'tryptich' (did you mean triptych?)"),
        ({"max_instances": 4}, 4, "max_instances: only for elastic clusters"),
        ({"elastic": "on", "min_instances": 5, "max_instances": 4}, None, "min_instances is 5, and max_instances 4"),
        ({"elastic": "on", "min_instances": 5}, 4, "min_instances is 5, and max_instances 4"),
        ({"elastic": "advise", "max_instances": 4}, 6, "max_instances is 4, and 6 are started"),
        ({"elastic": "on", "policy": "static"}, 4, "policy static keeps all instances as they are: leave out elastic"),
        ({"policy": "static", "max_instances": 5}, 4, "policy static keeps all instances as they are: leave out max_instances"),
        ({"elastic": "on", "policy": "elasticmm", "max_instances": 5}, 4, "changes roles and starts or ends no instances"),
        ({"elastic": "advise", "policy": "elasticmm", "min_instances": 5}, None, "leave out min_instances and max_instances"),
        ({"elastic": "on", "profile": "p.json", **EMULATED}, None, "emulated instances cost what is published"),
        ({"elastic": "on", "profile": "p.json"}, None, "which one is served"),
        ({"elastic": "on", "profile": "p.json", "model": "m"}, None, "cannot read the profile"),
    ],
)
def test_in_one_line(given: dict[str, Any], num_instances: int | None, error: str) -> None:
    with pytest.raises(BadRequest) as raised:
        check_elastic(Settings(**given), num_instances)
    assert error in raised.value.message
    assert "\n" not in raised.value.message


def test_what_fits_is_fine() -> None:
    check_elastic(Settings(), 3)
    check_elastic(Settings(elastic="on", min_instances=2, max_instances=8), 4)
    check_elastic(Settings(elastic="on", min_instances=2, max_instances=8))
    check_elastic(Settings(policy="static"), 4)
    check_elastic(with_limits(Settings(elastic="on", policy="elasticmm"), 4), 4)
    check_elastic(with_limits(Settings(elastic="on", policy="elasticmm"), 4))


def test_limits_that_were_left_out_are_the_number_at_the_start() -> None:
    assert with_limits(Settings(), 4) == Settings()
    for given, limits in (({}, (4, 4)), ({"max_instances": 6}, (4, 6)), ({"min_instances": 2}, (2, 4))):
        settings = with_limits(Settings(elastic="on", **given), 4)
        assert (settings.min_instances, settings.max_instances) == limits
        check_elastic(settings)


def test_encoders_with_a_tp_degree_of_their_own_cost_their_own() -> None:
    assert known_costs(Settings()) is None, "only what instances measure tells"
    four, one = (known_costs(Settings(elastic="on", emulate_tp=4, emulate_encoder_tp=tp, **EMULATED)) for tp in (4, 1))
    assert four is not None
    assert one is not None
    assert four.capacity["encoder"] > one.capacity["encoder"]
    assert (four.capacity["prefill"], four.decode) == (one.capacity["prefill"], one.decode)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(DEMO))
    work = PassWork(8, 1, 64, 8)
    stage = StageProfile(PassCosts(0.01, 0.001), FitError(1, 0.0, 0.0), (TimedPass(work, 0.02),))
    machine = Machine("cpu", "Some CPU", num_cores=8, num_threads=2, dtype="float32")
    for name, revision in (("own", checkpoint.revision), ("other", "abcdef0123456789")):
        model = ProfiledModel("a-model", revision, checkpoint.image)
        memory = MemoryCosts(10**8, 1000, 0, 512, 10**7)
        write_profile(Profile(VERSION, "2026-01-02T03:04:05Z", machine, model, memory, *[stage] * 4), tmp_path / name)
    for elastic in ("on", "off"):  # routers ask it as well
        check_elastic(Settings(elastic=elastic, model=str(DEMO), profile=str(tmp_path / "own")))
    with pytest.raises(BadRequest, match="this profile is of another model: a-model"):
        check_elastic(Settings(elastic="on", model=str(DEMO), profile=str(tmp_path / "other")))
