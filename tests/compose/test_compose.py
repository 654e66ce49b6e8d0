"""docker-compose.yml as a user runs it: real requests through 127.0.0.1, work on every replica, nothing else reachable."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from typing import Any

import pytest

from support.cases import Case, chat, picture, random_case
from support.client import Answer, ask, ask_all, session
from support.reference import Reference
from support.stack import Stack

pytestmark = pytest.mark.compose

SERVICES = {"router", "preprocess", "encoder", "prefill", "decode", "scaler"}
RECOVERY_TIMEOUT_S = 90.0  # chosen: a container of an engine starts again, on two cores that others use too


def _cases() -> dict[str, Case]:
    rng = random.Random(20)
    one, two = picture(rng, 96, 64), picture(rng, 50, 130, "JPEG")
    return {
        "text": chat("What is a triptych?", max_tokens=12),
        "one picture": chat("What is this?", one, max_tokens=12),
        "two pictures": chat(one, "and", two, "What differs?", max_tokens=12),
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", list(_cases()))
async def test_answers_equal_transformers(stack: Stack, stack_reference: Reference, name: str, stream: bool) -> None:
    case = _cases()[name]
    async with session() as http:
        first = await ask(http, stack.url, case, stream=stream)
        second = await ask(http, stack.url, case, stream=stream)
    assert first.error is None, stack.logs()
    assert first.text == second.text
    verdict = stack_reference.judge(case, first)
    assert not verdict.startswith("wrong"), verdict


async def test_every_replica_works(stack: Stack, stack_reference: Reference) -> None:
    cases = [random_case(seed, num_pictures=4) for seed in range(12)]
    answers = await ask_all(stack.url, cases, concurrency=12)
    verdicts = [stack_reference.judge(case, answer) for case, answer in zip(cases, answers, strict=True)]
    assert not [verdict for verdict in verdicts if verdict.startswith("wrong")], verdicts
    assert len(_instances(answers, "encode")) == 2, "the pictures went to one encoder only"
    assert len(_instances(answers, "decode")) == 2, "the answers came from one decode instance only"


def test_engines_share_the_cores(stack: Stack) -> None:
    """Each would take all of them otherwise."""
    files = {
        stack.compose("exec", engine, "stat", "-c", "%d %i", "/cores/in-use") for engine in ("encoder", "prefill", "decode")
    }
    assert len(files) == 1


def _instances(answers: list[Answer], stage: str) -> set[str]:
    times = [time for answer in answers for time in (answer.trace or {})["stages"]]
    return {time["instance_id"] for time in times if time["stage"].startswith(stage)}


def _service(container: dict[str, Any]) -> str:
    return str(container["Config"]["Labels"]["com.docker.compose.service"])


def test_only_the_router_is_published_and_only_on_loopback(stack: Stack) -> None:
    published = {
        (_service(container), binding["HostIp"])
        for container in stack.containers()
        for bindings in container["NetworkSettings"]["Ports"].values()
        for binding in bindings or ()
    }
    assert published == {("router", "127.0.0.1")}


def test_containers_are_hardened(stack: Stack) -> None:
    containers = stack.containers()
    assert {_service(container) for container in containers} == SERVICES | {"nats", "redis", "checkpoint"}
    for container in containers:
        name, host = container["Name"], container["HostConfig"]
        assert container["Config"]["User"] not in {"", "root", "0", "0:0"}, name
        assert host["ReadonlyRootfs"], name
        assert host["CapDrop"] == ["ALL"], name
        assert not host["Privileged"], name
        assert "no-new-privileges:true" in host["SecurityOpt"], name


async def test_a_killed_encoder_comes_back_and_requests_go_on(stack: Stack, stack_reference: Reference) -> None:
    """Docker restarts it; meanwhile the other one works."""
    stack.compose("exec", "--index", "1", "encoder", "python", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
    case = _cases()["two pictures"]
    async with session() as http:
        answer = await ask(http, stack.url, case)
    verdict = stack_reference.judge(case, answer)
    assert not verdict.startswith("wrong"), verdict
    _wait_for_encoders(stack, 2)


def _wait_for_encoders(stack: Stack, count: int) -> None:
    """Until `count` encoder containers are healthy again."""
    end_s = time.monotonic() + RECOVERY_TIMEOUT_S
    states: list[str] = []
    while time.monotonic() < end_s:
        rows = [json.loads(line) for line in stack.compose("ps", "--all", "--format", "json", "encoder").splitlines() if line]
        states = [f"{row['State']} {row['Health']}" for row in rows]
        if states.count("running healthy") == count:
            return
        time.sleep(0.5)
    pytest.fail(f"encoders after {RECOVERY_TIMEOUT_S} s: {states}\n{stack.logs()}")


def test_probes_answer(stack: Stack) -> None:
    for path in ("live", "ready", "health", "metrics", "v1/models"):
        with urllib.request.urlopen(f"{stack.url}/{path}", timeout=10) as response:
            assert response.status == 200, path
