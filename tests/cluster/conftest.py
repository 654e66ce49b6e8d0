"""Fixtures of the cluster tests: one cluster for the tests that only read, fresh ones for those that break things."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.cases import random_case
from support.cluster import MAX_BODY_BYTES, Cluster
from support.reference import Reference
from support.watch import Watch

StartCluster = Callable[..., Cluster]


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


@pytest.fixture(scope="module")
def start_cluster(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCluster]:
    """Starts clusters that live until the module ends or they are stopped."""
    number = itertools.count()
    with ExitStack() as stack:

        def start(*args: str, model_dir: Path = tiny_checkpoint, starter: Sequence[str] = (), **env: str) -> Cluster:
            made = Cluster(model_dir, tmp_path_factory.mktemp(f"cluster{next(number)}"), args, env, starter)
            stack.callback(_stop, made)
            return made

        yield start


def _stop(cluster: Cluster) -> None:
    if cluster.process.poll() is None:
        cluster.stop()


@pytest.fixture(scope="session")
def shared_cluster(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tiny_checkpoint, tmp_path_factory.mktemp("shared"), env={"TRIPTYCH_MAX_BODY_BYTES": str(MAX_BODY_BYTES)})
    yield made
    _stop(made)


@pytest.fixture
async def cluster(shared_cluster: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """The shared cluster, which every test leaves at rest: checked after each."""
    yield shared_cluster
    async with Watch(shared_cluster.nats_url) as watch:
        await watch.until_at_rest(5, f"after {request.node.name}")
