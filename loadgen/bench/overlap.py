"""Bench overlap: TTFT of a request with many images when its prompt is computed as they land, beside waiting for all of them.

Two clusters that differ in nothing else take turns with the same pictures. Emulated, at several ratios of prefill to encoding,
beside the bound of a perfect pipeline; and on a real engine, where all stages share this machine's cores.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import aiohttp
from PIL import Image

from triptych.loadgen.bench.measured_cluster import measured_cluster
from triptych.loadgen.bench.pipeline import Pipeline
from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.runner import Medians, Plan, Side, alternate, machine, tell
from triptych.loadgen.client import AnswerFailed, brings_token, chat_body, read_events
from triptych.shared.cost_model.published import published_cost_model

GPU = "a100"
NUM_ENCODERS = 2
POLICIES = {"overlapped": "triptych", "barrier": "triptych_barrier"}
NUM_WARMUPS = 2  # chosen: connections, and how fast each stage is
MIN_PAIRS = 30
QUESTION = "What do these pictures have in common?"
MAX_OVER_BOUND = 1.10
MAX_ENCODE_TOKENS = 256  # no picture of these has fewer

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Case:
    """sizes: of the pictures, in pixels, shuffled for each pair. max_ratio: of TTFT, the bar; None: no bar. tp, encoder_tp:
    GPUs of an instance, which set how prefill compares with encoding. time_scale: 0 for a real engine."""

    name: str
    model: str
    sizes: Sequence[Size]
    max_ratio: float | None
    tp: int = 1
    encoder_tp: int = 1
    time_scale: float = 1.0
    has_bound: bool = False

    def options(self, policy: str) -> tuple[str, ...]:
        """Of `triptych up`. One picture at a time: a vision tower gains nothing from more, and they would land together."""
        given = {"--policy": policy, "--encoder": NUM_ENCODERS, "--max-encode-tokens": MAX_ENCODE_TOKENS}
        if self.time_scale:
            given |= {"--emulate": GPU, "--emulate-tp": self.tp, "--emulate-encoder-tp": self.encoder_tp}
            given |= {"--time-scale": self.time_scale}
        return tuple(str(part) for option in given.items() for part in option)

    def pipeline(self) -> Pipeline | None:
        """None where nothing is emulated."""
        if not self.time_scale:
            return None
        encoder, prefill = (published_cost_model(GPU, self.model, tp) for tp in (self.encoder_tp, self.tp))
        return Pipeline(encoder, prefill, NUM_ENCODERS)


# InternVL2.5-26B computes a picture in half of the time that it is encoded in, Qwen2.5-VL-7B in about twice as long when the
# encoder has two GPUs. 3 to 6 tiles and a thumbnail: sizes of which some overtake others.
_TILED = ((1344, 448), (1344, 448), (896, 896), (896, 896), (896, 896), (896, 896), (1344, 896), (1344, 896))
_NATIVE = ((560, 560), (560, 560), (672, 672), (672, 672), (672, 672), (672, 672), (784, 784), (784, 784))
CASES = (
    Case("half", "internvl2.5-26b", _TILED, 0.72, has_bound=True),
    Case("tenth", "internvl2.5-26b", _TILED, 1.0, tp=8),
    Case("double", "qwen2.5-vl-7b", _NATIVE, 1.0, encoder_tp=2, time_scale=0.25),
    Case("one_image", "internvl2.5-26b", ((896, 896),), 1.02),
)
TORCH_SIZES = ((448, 448),) * 8


@dataclass(slots=True)
class _Client:
    """One side: a cluster. Each measurement sends the next pictures, the same ones in every cluster."""

    http: aiohttp.ClientSession
    url: str
    case: Case
    rounds: count[int] = field(default_factory=count)

    async def measure(self) -> Mapping[str, float]:
        """TTFT of an answer of one token, which a real one, of a random checkpoint, may have no text for."""
        rng = random.Random(next(self.rounds))
        sizes = rng.sample(self.case.sizes, len(self.case.sizes))
        body = chat_body(QUESTION, [_picture(rng, size) for size in sizes], 1)
        began_s, first_s, num_prompt_tokens = time.perf_counter(), 0.0, 0
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as response:
            async for chunk in read_events(response):
                if not first_s and brings_token(chunk):
                    first_s = time.perf_counter() - began_s
                num_prompt_tokens = (chunk.get("usage") or {}).get("prompt_tokens", 0)
        if not first_s:
            raise AnswerFailed("an answer without an end")
        figures = {"ttft_ms": 1000 * first_s}
        if pipeline := self.case.pipeline():
            figures["over_bound"] = first_s * self.case.time_scale / _bound_s(pipeline, sizes, num_prompt_tokens)
        return figures


async def bench_overlap(plan: Plan, model: Path | None) -> Report:
    """Measure the emulated cases, and the checkpoint in `model` when there is one.

    Raises:
        ClusterFailed, AnswerFailed: something didn't start, or didn't answer.
    """
    num_pairs = 1 if plan.is_quick else max(MIN_PAIRS, plan.num_runs)
    torch = [] if model is None else [Case("torch", str(model), TORCH_SIZES, None, time_scale=0.0)]
    figures: dict[str, float] = {}
    bars: dict[str, Bar] = {}
    for case in (*(CASES[:1] if plan.is_quick else CASES), *torch):
        tell(f"{num_pairs} pairs: {case.name} ...")
        medians = await _measure(case, num_pairs)
        figures |= _figures(case.name, medians)
        tell(f"{case.name}: {figures[f'{case.name}_ratio']:.3f} of the TTFT with a barrier")
        if pipeline := case.pipeline():
            images = [pipeline.encoder.image(*size) for size in case.sizes]
            figures[f"{case.name}_prefill_to_encode"] = pipeline.prefill_to_encode(images)
        if case.max_ratio is not None:
            bars[f"{case.name}_ratio"] = Bar(figures[f"{case.name}_ratio"], case.max_ratio, is_most=True)
        if case.has_bound:
            bars[f"{case.name}_over_bound"] = Bar(medians["overlapped"]["over_bound"], MAX_OVER_BOUND, is_most=True)
    conditions = machine() | {"emulated": GPU, "pairs": num_pairs, "torch": str(model or ""), "quick": plan.is_quick}
    return Report("overlap", conditions, figures, {} if plan.is_quick else bars)


async def _measure(case: Case, num_pairs: int) -> Medians:
    """Of both sides, in turn."""
    sides: dict[str, Side] = {}
    async with AsyncExitStack() as clusters:
        for name, policy in POLICIES.items():
            info, http = await clusters.enter_async_context(measured_cluster(case.model, case.options(policy)))
            sides[name] = _Client(http, str(info["url"]).rstrip("/"), case).measure
        return await alternate(sides, num_pairs, NUM_WARMUPS)


def _bound_s(pipeline: Pipeline, sizes: Sequence[Size], num_prompt_tokens: int) -> float:
    """Modelled seconds."""
    images = [pipeline.encoder.image(*size) for size in sizes]
    landed_s = pipeline.landings_s(images, [pipeline.encoder.preprocess_s(*size) for size in sizes])
    return pipeline.first_token_s(images, landed_s, num_prompt_tokens - sum(image.num_tokens for image in images))


def _figures(name: str, medians: Medians) -> dict[str, float]:
    by_side = {f"{name}_{figure}.{side}": value for side, found in medians.items() for figure, value in found.items()}
    return by_side | {f"{name}_ratio": medians["overlapped"]["ttft_ms"] / medians["barrier"]["ttft_ms"]}


def _picture(rng: random.Random, size: Size) -> bytes:
    """Of one colour, which no other picture of a run has."""
    file = io.BytesIO()
    Image.new("RGB", size, tuple(rng.randrange(256) for _ in range(3))).save(file, "PNG")
    return file.getvalue()
