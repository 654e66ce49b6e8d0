"""The demo checkpoint through the whole product: the same answers as in plain transformers, alone and under load."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from support.cases import MODEL, Case, Picture, chat
from support.client import Answer
from support.cluster import Cluster
from support.parity import check_parity
from support.reference import Reference
from support.watch import Watch
from triptych.loadgen.world import ADVERTISED, Example, held_out_examples

CHECKPOINT = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "checkpoint"
NUM_QUESTIONS = 500  # the number, over all advertised tasks
UNLOADED_EVERY = 5  # 100 of them are asked alone
SEED = 4  # not the card's


def _examples() -> list[Example]:
    """One task after the other, again and again: neighbours, asked at one time, are of different kinds."""
    per_task = -(-NUM_QUESTIONS // len(ADVERTISED))
    by_task = [held_out_examples(task, per_task, SEED) for task in ADVERTISED]
    return [example for turn in zip(*by_task, strict=True) for example in turn][:NUM_QUESTIONS]


def _case(example: Example) -> Case:
    pictures = []
    for image in example.pictures:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        pictures.append(Picture("image/png", buffer.getvalue()))
    return chat(*pictures, example.question.text, max_tokens=32)


def _accuracy(examples: Sequence[Example], answers: Sequence[Answer]) -> float:
    return sum(e.question.answer == a.text for e, a in zip(examples, answers, strict=True)) / len(examples)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_accuracy_is_that_of_transformers(start_cluster: Callable[..., Cluster], reference_cache: Path) -> None:
    """check_parity: every answer equals transformers' own, but for float ties."""
    reference = Reference(CHECKPOINT, reference_cache)
    examples = _examples()
    cases = [_case(example) for example in examples]
    cluster = start_cluster(model_dir=CHECKPOINT, TRIPTYCH_MODEL_NAME=MODEL)
    async with Watch(cluster.nats_url) as watch:
        await watch.until_complete()
        unloaded = slice(None, None, UNLOADED_EVERY)
        alone = await check_parity(cluster.url, cases[unloaded], reference, concurrency=1)
        loaded = await check_parity(cluster.url, cases, reference, concurrency=16)
        await watch.until_at_rest(5, "after the questions")
    in_transformers = sum(e.question.answer == reference.answer(c).text for e, c in zip(examples, cases, strict=True))
    print(f"accuracy in transformers {in_transformers / len(cases):.3f} of {len(cases)} questions")
    print(f"through the cluster: {_accuracy(examples, loaded):.3f} at concurrency 16, ", end="")
    print(f"{_accuracy(examples[unloaded], alone):.3f} of {len(alone)} alone")
    assert cluster.stop() == 0
