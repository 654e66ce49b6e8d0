"""Thread counts and resolver options of a process, as environment variables."""

from __future__ import annotations

import os

import pytest

from triptych.shared.environment import process_environment
from triptych.shared.settings import Settings


@pytest.mark.parametrize(("threads", "is_engine", "expected"), [(3, True, "3"), (3, False, "1")])
def test_threads_are_bounded_and_passive(threads: int, is_engine: bool, expected: str) -> None:
    env = process_environment(Settings(threads=threads), is_engine)
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == expected
    assert (env["OMP_WAIT_POLICY"], env["TOKENIZERS_PARALLELISM"]) == ("passive", "false")
    assert 0 < int(env["GOMP_SPINCOUNT"]) < 1000


@pytest.mark.parametrize(("engine_instances", "expected"), [(1, "8"), (3, "2"), (20, "1")])
def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch, engine_instances: int, expected: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert process_environment(Settings(engine_instances=engine_instances), True)["OMP_NUM_THREADS"] == expected


def test_a_dead_name_server_costs_seconds_not_tens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    assert process_environment(Settings(), True)["RES_OPTIONS"] == "timeout:1 attempts:2"
    monkeypatch.setenv("RES_OPTIONS", "rotate")
    assert process_environment(Settings(), True)["RES_OPTIONS"] == "rotate"
