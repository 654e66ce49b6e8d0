"""`triptych profile --emulate`: what published figures come to, and which TP degree they speak for."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from triptych.services import cli
from triptych.services.profiler.command import TYPICAL
from triptych.services.profiler.published import choose
from triptych.shared.cost_model.derived import image_capacity, text_capacity
from triptych.shared.cost_model.models import MODELS

runner = CliRunner()


@pytest.mark.parametrize("model", MODELS)
def test_the_chosen_degree_has_most_throughput_per_gpu(model: str) -> None:
    choice = choose("a100", model, TYPICAL, 5.0)
    models = [costs for costs, _ in choice.by_tp]
    assert [costs.tp for costs in models] == ([1, 2, 4] if model.startswith("qwen") else [1, 2, 4, 8])  # 28 heads
    for chosen, capacity in ((choice.image_tp, image_capacity), (choice.text_tp, text_capacity)):
        rates = {costs.tp: capacity(costs, TYPICAL, choice.slo).tokens_per_s / costs.tp for costs in models}
        assert rates[chosen or 0] == max(rates.values()) > 0


def test_an_encoder_gains_less_from_tp_than_text_does() -> None:
    """ModServe: more encoder instances beat larger ones."""
    choice = choose("a100", "internvl2.5-26b", TYPICAL, 5.0)
    assert choice.image_tp == 1
    assert choice.text_tp is not None
    assert choice.text_tp >= choice.image_tp


def test_an_slo_that_nothing_meets_chooses_nothing() -> None:
    choice = choose("a100", "qwen2.5-vl-7b", TYPICAL, 0.01)
    assert (choice.image_tp, choice.text_tp) == (None, None)


def test_it_is_told_as_emulated() -> None:
    shown = runner.invoke(cli.app, ["profile", "--emulate", "h100", "--model", "llama-3.2-11b"])
    assert shown.exit_code == 0
    assert shown.stdout.startswith("emulated: from published figures, nothing was measured")
    assert "Llama-3.2-11B-Vision on 8 x H100-80G" in shown.stdout
    assert shown.stdout.count("chosen ") == 2
    told = json.loads(runner.invoke(cli.app, ["profile", "--emulate", "h100", "--model", "llama-3.2-11b", "--json"]).stdout)
    assert told["emulated"] is True
    assert set(told["tp"]) == {"1", "2", "4", "8"}
    assert told["tp"]["1"]["image"]["tokens_per_s"] > 0


def test_what_there_are_no_figures_of_is_one_line() -> None:
    for arguments in (["--emulate", "b200", "--model", "llama-3.2-11b"], ["--emulate", "a100", "--model", "gpt-9"]):
        result = runner.invoke(cli.app, ["profile", *arguments])
        assert result.exit_code == 2
        assert result.stderr.startswith("error: no figures for")
        assert result.stderr.count("\n") == 1
