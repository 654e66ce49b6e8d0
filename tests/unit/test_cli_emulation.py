"""Flags that contradict each other, where GPUs are emulated or costs are measured: one line, before anything starts."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from triptych.services import cli

UP = ["up", "--port", "0", "--model", "llama-3.2-11b"]
SERVE = ["serve", "--nats-url", "nats://h", "--model", "llama-3.2-11b", "--emulate", "a100"]
PROFILE = ["profile", "--model", "llama-3.2-11b"]
runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*UP, "--time-scale", "2"], "time_scale: only for emulated instances"),
        ([*UP, "--emulate", "b200"], "no figures for GPU 'b200'; there are a100"),
        ([*UP, "--emulate", "a100", "--emulate-encoder-tp", "3"], "cannot run at TP 3"),
        ([*UP, "--emulate", "a100", "--device", "cuda"], "device is cuda, but emulated"),
        ([*UP, "--emulate", "a100", "--kv-cache-bytes", "99999999999"], "beside the weights"),
        ([*UP, "--emulate", "a100", "--time-scale", "0"], "TRIPTYCH_TIME_SCALE"),
        ([*UP, "--emulate", "a100", "--time-scale", "nan"], "TRIPTYCH_TIME_SCALE"),
        ([*UP, "--emulate", "a100", "--colocated", "--decode", "4"], "--colocated is one of all roles: leave out the counts"),
        ([*SERVE, "encoder=513"], "at most 512"),
        ([*SERVE, "encoder=" + "9" * 5000], "at most 512"),
        ([*SERVE, "encoder=1,encoder=2"], "'encoder=2' is not STAGE=COUNT"),
        ([*SERVE, "encoder=-1"], "'encoder=-1' is not STAGE=COUNT"),
        ([*SERVE, "encoder=0"], "there is no instance"),
        ([*SERVE, "encoder.video=2"], "'encoder.video=2' is not STAGE=COUNT"),
        ([*UP, "--emulate", "a100", "--instances", "4", "--min-instances", "9"], "min_instances is 9, and max_instances 4"),
        ([*UP, "--emulate", "a100", "--policy", "static", "--elastic", "on"], "policy static keeps all instances as they are"),
        ([*UP, "--emulate", "a100", "--max-instances", "9"], "max_instances: only for elastic clusters"),
        ([*PROFILE, "--emulate", "a100", "--quick"], "--emulate measures and loads nothing: leave out --quick"),
        ([*PROFILE, "--emulate", "a100", "--load", "a.json"], "leave out --load"),
        ([*PROFILE, "--load", "a.json", "--out", "b.json"], "--load measures nothing: leave out --out"),
        ([*PROFILE, "--emulate-tp", "2"], "emulate_tp: only for emulated instances"),
    ],
)
def test_contradictions_are_one_clear_line(arguments: list[str], said: str) -> None:
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
