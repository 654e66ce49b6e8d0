"""The command line: which flags there are, what errors look like, and that --help does not load torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from triptych.services import cli
from triptych.services.launcher.run_file import announce_run
from triptych.services.setting_flags import flag_of
from triptych.shared.settings import Settings

OWN_FLAGS = {
    "up": {
        "router",
        "preprocess",
        "encoder",
        "prefill",
        "decode",
        "colocated",
        "instances",
        "ready-timeout-s",
        "log-dir",
        "json",
    },
    "serve": {"instance-id"},
    "status": {"decisions", "json"},
    "drain": {"json"},
    "profile": {"quick", "out", "load", "slo-factor", "json"},
    "config": {"json"},
}
runner = CliRunner()


def flags_of(command: str) -> set[str]:
    """As the command itself tells them when it gets an unknown one."""
    result = runner.invoke(cli.app, [command, "x", "--nonsense"] if command in {"serve", "drain"} else [command, "--nonsense"])
    assert result.exit_code == 2
    return {flag.strip() for flag in result.stderr.partition("allowed: ")[2].split(",")}


@pytest.mark.parametrize("command", sorted(OWN_FLAGS))
def test_every_setting_has_a_flag_and_there_are_no_others(command: str) -> None:
    """A new flag is a new promise: this list changes on purpose only."""
    settings = {flag_of(name) for name in Settings.model_fields if (command, name) != ("up", "name")}
    assert flags_of(command) == settings | {f"--{flag}" for flag in OWN_FLAGS[command]}


def test_an_unknown_flag_is_named_with_its_neighbour() -> None:
    result = runner.invoke(cli.app, ["config", "--max-imags=4"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: unknown setting --max-imags (did you mean --max-images?); allowed: --")
    assert result.stdout == ""


def test_help_names_every_flag_in_full_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = runner.invoke(cli.app, ["up", "--help"]).stdout
    assert all(flag_of(name) in shown for name in Settings.model_fields if name != "name")
    assert "(default 8000)" in shown


def test_help_of_a_client_command_lists_what_matters_to_it() -> None:
    shown = runner.invoke(cli.app, ["status", "--help"]).stdout
    assert "--nats-url" in shown
    assert "--block-size" not in shown


def test_flags_and_environment_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_MAX_IMAGES", "4")
    result = runner.invoke(cli.app, ["config", "--json", "--block-size", "8", "--log-json"])
    shown = json.loads(result.stdout)
    assert (shown["max_images"], shown["block_size"], shown["log_json"], shown["max_messages"]) == (4, 8, True, 512)
    assert set(shown) == set(Settings.model_fields)


def test_config_hides_passwords_and_marks_what_was_set() -> None:
    result = runner.invoke(cli.app, ["config", "--redis-url", "redis://:hunter2@h:6379/0"])
    assert "hunter2" not in result.stdout
    assert "* TRIPTYCH_REDIS_URL=redis://***@h:6379/0" in result.stdout
    assert "  TRIPTYCH_MAX_IMAGES=32" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["config", "--port", "70000"], 2, "TRIPTYCH_PORT=70000"),
        (["up"], 2, "which model?"),
        (["serve", "encode", "--nats-url", "nats://h"], 2, "unknown stage 'encode'; allowed: router, preprocess, encoder"),
        (["serve", "encoder,router", "--nats-url", "nats://h"], 2, "router has a process of its own"),
        (["serve", "scaler"], 2, "--nats-url or TRIPTYCH_NATS_URL"),
        (["serve", "encoder", "--nats-url", "nats://h"], 2, "which model?"),
        (["serve", "scaler", "--nats-url", "nats://h", "--name", "a.b"], 2, "name 'a.b'"),
        (["up", "some/model"], 2, "such as --model some/model"),
        (["up", "--model", "m", "--bind-host", "0.0.0.0"], 2, "not all interfaces: `hostname`"),
        (["status", "--nats-url", "//"], 2, "TRIPTYCH_NATS_URL is not a NATS server's URL"),
    ],
)
def test_mistakes_are_one_clear_line(arguments: list[str], status: int, message: str) -> None:
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_gpu_that_is_not_there_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "num_cuda_devices", lambda: 0)
    result = runner.invoke(cli.app, ["up", "--model", "m", "--device", "cuda", "--port", "0"])
    assert result.exit_code == 2
    assert result.stderr == "error: device is cuda, but there is no CUDA device on this machine\n"


def test_no_cluster_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    result = runner.invoke(cli.app, ["status"])
    assert result.exit_code == 2
    assert "no cluster runs here" in result.stderr


def test_the_port_chooses_among_clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run = announce_run("http://127.0.0.1:8001", "//")
    wrong = runner.invoke(cli.app, ["status", "--port", "8000"])
    assert wrong.stderr == "error: no cluster has port 8000 here; there are: http://127.0.0.1:8001\n"
    right = runner.invoke(cli.app, ["status", "--port", "8001"])
    assert "not a NATS server's URL" in right.stderr, "the chosen cluster's was tried"
    run.withdraw()


def test_version() -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("triptych ")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from triptych.services import cli\n"
        "sys.argv = ['triptych', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit: pass\n"
        "print('LOADED', [name for name in ('torch', 'transformers', 'fastapi', 'nats', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "LOADED []" in done.stdout
