"""Fixtures of the cluster tests: a few clusters for the tests that only send requests, others for those that break things."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.cases import random_case
from support.cluster import FEW_INFLIGHT, MAX_BODY_BYTES, STARTER, Cluster
from support.reference import Reference
from support.watch import Watch

StartCluster = Callable[..., Cluster]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def reference_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = getattr(pytestconfig, "cache", None)
    return Path(cache.mkdir("triptych-reference")) if cache is not None else tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="session")
def reference(tiny_checkpoint: Path, reference_cache: Path) -> Reference:
    return Reference(tiny_checkpoint, reference_cache)


@pytest.fixture(scope="session")
def stopping_checkpoint(tiny_checkpoint: Path, reference: Reference) -> Path:
    """The tiny checkpoint with room for prompts that don't fit in a message, and with stop tokens that it often says:
    as it is, its random weights hardly ever end an answer."""
    folder = tiny_checkpoint.with_name("tiny-stopping")
    shutil.copytree(tiny_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if "max_position_embeddings" in part:
            part["max_position_embeddings"] = 32_768
    (folder / "config.json").write_text(json.dumps(config))
    said = Counter(token for seed in range(20) for token in set(reference.answer(random_case(seed)).token_ids))
    generation = json.loads((folder / "generation_config.json").read_text())
    generation["eos_token_id"] = [generation["eos_token_id"], *sorted(token for token, _ in said.most_common(8))]
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="session")
def stopping_reference(stopping_checkpoint: Path, reference_cache: Path) -> Reference:
    return Reference(stopping_checkpoint, reference_cache)


@contextlib.contextmanager
def _clusters(model_dir: Path, factory: pytest.TempPathFactory) -> Iterator[StartCluster]:
    """Starts clusters that live until the context ends or they are stopped."""
    started: list[Cluster] = []

    def start(*args: str, model_dir: Path = model_dir, starter: Sequence[str] = (), **env: str) -> Cluster:
        started.append(Cluster(model_dir, factory.mktemp("cluster"), args, env, starter))
        return started[-1]

    yield start
    running = [cluster for cluster in started if cluster.process.poll() is None]
    with ThreadPoolExecutor() as threads:
        list(threads.map(Cluster.stop, running))


@pytest.fixture(scope="module")
def start_cluster(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCluster]:
    """For clusters of one module."""
    with _clusters(tiny_checkpoint, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def start_for_all(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCluster]:
    """For the clusters below. Each costs ten seconds: tests share them where they can."""
    with _clusters(tiny_checkpoint, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def shared_cluster(start_for_all: StartCluster) -> Cluster:
    """For tests that only send requests, until the last of all kills its starter. Heartbeats come more often than by default:
    whoever waits for rest waits for one."""
    env = {"TRIPTYCH_MAX_BODY_BYTES": str(MAX_BODY_BYTES), "TRIPTYCH_HEARTBEAT_INTERVAL_S": "0.2"}
    return start_for_all(starter=STARTER, **env)


@pytest.fixture(scope="session")
def colocated_cluster(start_for_all: StartCluster) -> Cluster:
    """One engine process, few requests at a time, and pictures may come from web sites of our own."""
    return start_for_all("--colocated", TRIPTYCH_ALLOW_PRIVATE_MEDIA="1", TRIPTYCH_MAX_INFLIGHT=str(FEW_INFLIGHT))


@pytest.fixture(scope="session")
def demo_cluster(start_for_all: StartCluster) -> Cluster:
    """Of the trained checkpoint, with every setting as it comes: the README's."""
    return start_for_all(model_dir=ROOT / "deploy" / "demo" / "checkpoint")


@pytest.fixture
async def cluster(shared_cluster: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """The shared cluster, which every test leaves at rest: checked after each."""
    yield shared_cluster
    async with Watch(shared_cluster.nats_url) as watch:
        await watch.until_at_rest(5, f"after {request.node.name}")
