"""`triptych up --emulate`: the whole control plane over emulated GPUs, installed without torch, labelled as what it is."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from PIL import Image

from support.client import session
from support.cluster import Cluster, wait_for
from support.watch import Watch
from triptych.shared.messages import Heartbeat

COUNTS = {"encoder": 2, "prefill": 2, "decode": 3, "preprocess": 2}
TIME_SCALE = 100.0
LABEL = {"gpu": "a100", "time_scale": TIME_SCALE}
RECOVER_WITHIN_S = 30.0
WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_absent = name.partition(".")[0] in {"torch", "safetensors"}
        return None if is_absent else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""  # as sitecustomize.py: an interpreter that cannot find what only the extra `torch` installs


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("emulated")
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(WITHOUT_TORCH)
    args = ["--emulate", "a100", "--time-scale", str(TIME_SCALE)]
    args += [word for stage, count in COUNTS.items() for word in (f"--{stage}", str(count))]
    cluster = Cluster(Path("llama-3.2-11b"), folder / "run", args, {"PYTHONPATH": str(folder / "path")})
    yield cluster
    assert cluster.stop() == 0


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return msgspec.json.decode(response.read())


def picture(color: str = "red") -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (896, 896), color).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def chat(http: aiohttp.ClientSession, url: str, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What is there to see?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 30, **fields}
    async with http.post(f"{url}/v1/chat/completions", json=body, headers={"X-Triptych-Trace": "1"}) as response:
        answer: dict[str, Any] = await response.json()
        return answer | {"status": response.status}


def text_of(answer: dict[str, Any]) -> str:
    assert answer["status"] == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def test_it_says_that_it_is_emulated_everywhere(emulated: Cluster) -> None:
    assert emulated.info["emulation"] == LABEL
    assert get(f"{emulated.url}/version")["emulated"] == LABEL
    assert get(f"{emulated.url}/health")["emulated"] == LABEL
    assert [model["emulated"] for model in get(f"{emulated.url}/v1/models")["data"]] == [LABEL]
    instances = emulated.status()["instances"]
    assert len(instances) == sum(COUNTS.values()) + 2, "and router and scaler"
    assert all(beat["model"]["emulation"] == LABEL for beat in instances if beat["name"] != "scaler-0")
    assert len({beat["resources"]["pid"] for beat in instances}) == 3
    for beat in instances:
        if beat["service"] == "instance":
            assert get(f"{beat['http_url']}/health")["instance_id"] == beat["instance_id"]
            with urllib.request.urlopen(f"{beat['http_url']}/metrics", timeout=10) as response:
                assert 'triptych_emulation_info{gpu="a100",time_scale="100"} 1.0' in response.read().decode()


async def test_answers_are_repeatable_and_counted(emulated: Cluster) -> None:
    async with session() as http:
        asked = [(), (), (picture(),), (picture(),), (picture("blue"),), (picture(), picture("blue"))]
        answers = await asyncio.gather(*(chat(http, emulated.url, *parts, ignore_eos=True) for parts in asked))
        texts = [text_of(answer) for answer in answers]
        assert texts[0] == texts[1]
        assert texts[2] == texts[3]
        assert len({texts[0], texts[2], texts[4], texts[5]}) == 4
        for answer, parts in zip(answers, asked, strict=True):
            usage = answer["usage"]
            assert usage["completion_tokens"] == 30
            assert usage["prompt_tokens_details"]["image_tokens"] == 1601 * len(parts)
        stages = [row["stage"] for row in answers[2]["triptych"]["stages"]]
        assert stages == ["preprocess", "encoder", "prefill", "decode"]
        body = {"prompt": [7] * 13_000, "max_tokens": 5, "ignore_eos": True}
        async with http.post(f"{emulated.url}/v1/completions", json=body) as response:
            assert (await response.json())["usage"]["prompt_tokens"] == 13_000, "as a leased tensor: too long for a message"


async def test_much_work_leaves_nothing_behind(emulated: Cluster) -> None:
    async with session() as http:
        sent = [chat(http, emulated.url, *([picture()] if i % 4 == 0 else []), max_tokens=20 + i % 40) for i in range(200)]
        assert {answer["status"] for answer in await asyncio.gather(*sent)} == {200}
    wait_for(lambda: is_at_rest(emulated), 20, "all blocks and leases are given back")


def is_at_rest(emulated: Cluster) -> bool:
    held = [beat["resources"] for beat in emulated.status()["instances"] if beat["service"] in ("instance", "preprocess")]
    leases = sum(one.get("num_leases", 0) for one in held)
    num_unused = [one.get("num_free_blocks", 0) + one.get("num_cached_blocks", 0) for one in held]
    return leases == 0 and num_unused == [one.get("num_blocks", 0) for one in held]


def num_decoding(beats: Mapping[str, Heartbeat]) -> int:
    return sum(load.num_running for beat in beats.values() for load in beat.loads if load.stage == "decode")


async def test_an_instance_is_drained_under_load_and_nothing_is_lost(emulated: Cluster) -> None:
    async with session() as http:
        sent = [asyncio.create_task(chat(http, emulated.url, max_tokens=100 + i, ignore_eos=True)) for i in range(30)]
        drain = [str(Path(sys.executable).with_name("triptych")), "drain", "decode-2", "--nats-url", emulated.nats_url]
        drained = await asyncio.create_subprocess_exec(*drain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = await asyncio.wait_for(drained.communicate(), 60)
        assert {answer["status"] for answer in await asyncio.gather(*sent)} == {200}
    assert drained.returncode == 0, said
    assert "decode-2" not in {beat["name"] for beat in emulated.status()["instances"]}


async def test_a_killed_host_comes_back_and_its_requests_end(emulated: Cluster) -> None:
    """All instances at once: the launcher tells of each, and starts the process again when the scaler asks."""
    host = emulated.info["pids"]["emulated-0"]
    async with session() as http, Watch(emulated.nats_url) as watch:
        before = text_of(await chat(http, emulated.url, picture()))
        running = [asyncio.create_task(chat(http, emulated.url, max_tokens=60_000, ignore_eos=True)) for _ in range(8)]
        await watch.until(lambda beats: num_decoding(beats) == len(running), 20, "all are decoded")
        os.kill(host, signal.SIGKILL)
        for answer in await asyncio.wait_for(asyncio.gather(*running), 60):
            assert answer["status"] in (200, 500, 502, 503, 504), answer
        wait_for(emulated.is_ready, RECOVER_WITHIN_S, "the instances are back")
        assert text_of(await chat(http, emulated.url, picture())) == before
    assert emulated.status()["num_restarts"] == 1, "of a process, whatever many instances it has"


@pytest.mark.long
async def test_tiles_of_a_picture_are_encoded_side_by_side_and_found_again(tmp_path: Path) -> None:
    args = ["--emulate", "a100", "--time-scale", "5", "--encoder", "3"]
    cluster = Cluster(Path("internvl2.5-26b"), tmp_path / "run", args)
    try:
        async with session() as http:
            answers = [
                await chat(http, cluster.url, {"type": "text", "text": text}, picture()) for text in ("First.", "Then, again:")
            ]
        new, known = [
            [row for row in answer["triptych"]["stages"] if row["stage"] == "encoder"] for answer in answers if text_of(answer)
        ]
        assert len({row["instance_id"] for row in new}) == len(new) == 3
        assert all(row["compute_ms"] > 0 for row in new)
        assert {row["instance_id"]: row["compute_ms"] for row in known} == {row["instance_id"]: 0 for row in new}
        wait_for(lambda: is_at_rest(cluster), 20, "all blocks and leases are given back")
    finally:
        assert cluster.stop() == 0
