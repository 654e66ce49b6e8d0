"""An emulated cluster whose policy moves its instances: a burst of pictures, the switch that it brings, its explanation, and
requests that go on meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

from support.client import session
from support.cluster import Cluster, wait_for
from support.watch import Watch
from triptych.shared.bus import Bus
from triptych.shared.errors import Overloaded
from triptych.shared.messages import InstanceId, Launched, ScaleOutRequest

NUM_INSTANCES = 8
TIME_SCALE = 4.0  # slow enough for what waits to wait at the emulated stages, whatever the machine does
SWITCH_WITHIN_S = 120.0  # chosen: the policy looks every modelled second, on a machine that may be busy


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    args = ["--emulate", "a100", "--time-scale", str(TIME_SCALE), "--policy", "elasticmm"]
    args += ["--instances", str(NUM_INSTANCES)]
    cluster = Cluster(Path("llama-3.2-11b"), tmp_path_factory.mktemp("elastic") / "run", args)
    yield cluster
    assert cluster.stop() == 0


def triptych(cluster: Cluster, *words: str) -> str:
    command = [str(Path(sys.executable).with_name("triptych")), *words]
    env = {**os.environ, "TRIPTYCH_NATS_URL": cluster.nats_url}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def decisions(cluster: Cluster) -> list[dict[str, Any]]:
    return list(json.loads(triptych(cluster, "status", "--decisions", "--json"))["decisions"])


def pictures(seed: int) -> list[dict[str, Any]]:
    """Four, which nobody has seen."""
    urls = []
    for index in range(4):
        file = io.BytesIO()
        Image.new("RGB", (896, 896), (seed % 256, seed // 256 % 256, index)).save(file, "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


async def ask(http: aiohttp.ClientSession, cluster: Cluster, content: list[dict[str, Any]], num_tokens: int) -> int:
    content = [*content, {"type": "text", "text": "What is there to see?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    async with http.post(f"{cluster.url}/v1/chat/completions", json=body) as response:
        await response.read()
        return response.status


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_burst_of_pictures_moves_instances_and_the_log_says_why(elastic: Cluster) -> None:
    is_over, statuses, seeds = asyncio.Event(), list[int](), iter(range(1, 60_000))

    async def user(http: aiohttp.ClientSession, has_pictures: bool) -> None:
        while not is_over.is_set():
            content = pictures(next(seeds)) if has_pictures else []
            statuses.append(await ask(http, elastic, content, 8 if has_pictures else 200))

    async with session() as http, asyncio.TaskGroup() as users:
        for index in range(24):
            users.create_task(user(http, index % 4 != 0))
        try:
            await asyncio.to_thread(
                wait_for,
                lambda: [one for one in decisions(elastic) if one["action"] == "switch" and one["result"] == "done"],
                SWITCH_WITHIN_S,
                "a switch",
                0.5,
            )
        finally:
            is_over.set()
    assert set(statuses) == {200}, "nobody noticed"
    switch = next(one for one in decisions(elastic) if one["action"] == "switch" and one["result"] == "done")
    assert switch["took_s"] < 5
    assert switch["reason"]
    assert sum(switch["before"]["instances"].values()) == NUM_INSTANCES


@pytest.mark.long
@pytest.mark.timeout(120)
def test_what_was_done_is_shown_to_people_and_counted(elastic: Cluster) -> None:
    text = triptych(elastic, "status", "--decisions")
    assert "switch " in text
    assert "before: " in text
    assert "policy elasticmm" in text
    told = elastic.status()["instances"]
    engines = [beat for beat in told if beat["service"] == "instance"]
    assert len(engines) == NUM_INSTANCES
    assert {role for beat in engines for role in beat["roles"]} == {"encoder", "prefill", "decode"}
    [scaler] = [beat["http_url"] for beat in told if beat["service"] == "scaler"]
    with urllib.request.urlopen(f"{scaler}/metrics", timeout=10) as response:
        metrics = response.read().decode()
    assert 'triptych_elastic_actions_total{action="switch",result="done"} 0.0' not in metrics
    assert "triptych_replicas{" in metrics


async def one_more(bus: Bus, launcher_id: InstanceId) -> str:
    """Its name. The launcher may hear a moment later than others that there is room."""
    async with asyncio.timeout(20):
        while True:
            try:
                reply = await bus.request(launcher_id, ScaleOutRequest("text", "text"), 20)
            except Overloaded:
                await asyncio.sleep(0.05)
            else:
                assert isinstance(reply, Launched)
                return reply.name


async def test_one_instance_less_and_one_more(elastic: Cluster) -> None:
    """By the launcher, as the scaler asks it; the fixture sees that it ends with the cluster."""
    bus = await Bus.connect(elastic.nats_url, "test")
    try:
        async with Watch(elastic.nats_url) as watch:
            await watch.until(lambda beats: any(beat.service == "launcher" for beat in beats.values()), 20, "the launcher")
            launcher_id, leaving = watch.of("launcher").instance_id, "decode-0"
            for _ in range(2):  # one of the first ones, then one that was launched
                triptych(elastic, "drain", leaving)
                await watch.until(
                    lambda beats, name=leaving: all(beat.name != name for beat in beats.values()), 20, "one to leave"
                )
                name = leaving = await one_more(bus, launcher_id)
                await watch.until(
                    lambda beats, name=name: any((beat.name, beat.state) == (name, "ready") for beat in beats.values()),
                    90,
                    name,
                )
                assert watch.of(name).group == "text"
    finally:
        await bus.close()
    assert leaving in {beat["name"] for beat in elastic.status()["instances"]}
