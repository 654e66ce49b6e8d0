"""Bench engine: our engine beside transformers' batched `generate`, its bare forward pass, and vLLM on a CPU, one model.

Each side takes part in as many variants (thread counts, kinds of cache) as it has; a short trial finds its best for prefill
and for decode, which are then measured in turn with those of the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import transformers

from triptych.loadgen.bench.engine_sides import (
    CacheKind,
    Case,
    EngineSide,
    ForwardSide,
    GenerateSide,
    TransformersModel,
    TriptychSide,
    num_plain_token_ids,
)
from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.runner import BenchFailed, Plan, alternate, machine, tell
from triptych.loadgen.bench.vllm_process import VllmOptions, vllm_side
from triptych.shared.checkpoint import Checkpoint, open_checkpoint
from triptych.shared.machine import num_cores

PROMPT_TOKENS = (128, 1024)
BATCH_SIZES = (1, 8, 32)
TRIAL_OUTPUT_TOKENS = 17  # chosen: 16 decode steps tell one thread from many
TRIAL_WORK = 1e11  # chosen: parameters times prompt tokens, a few seconds of one core
QUICK = (Case(16, 2, 4),)
SMALL_MODEL_PARAMETERS = 50_000_000  # chosen: below it what is not the forward pass decides, and vLLM is the bar
SMALL_DECODE_BARS = {1: 1.2, 8: 1.2, 32: 1.0}  # the promise, by batch size, of vLLM's tokens/s
CACHES: tuple[CacheKind, ...] = ("static", "dynamic")
# Of a cache, chosen. What is made anew at every step leaves the heap in pieces: with 0.3 GB, 128 steps of a dynamic cache, or
# of bare passes with any, had more of them than a machine of 24 GB has memory (measured)
MAX_PIECEMEAL_BYTES = 128e6
PHASES = ("prefill", "decode")
BLOCK_SLACK_TOKENS = 256  # the largest KV block: what a sequence can leave empty


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """vllm_python: an interpreter that has vLLM; without one there is no such side."""

    model: Path
    cases: Sequence[Case]
    vllm_python: Path | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a side. name: for people. max_tokens: of all sequences of a case, with their outputs."""

    name: str
    side: EngineSide
    num_threads: int
    max_tokens: float = math.inf

    def can(self, case: Case) -> bool:
        return case.batch_size * (case.num_prompt_tokens + case.num_output_tokens) <= self.max_tokens

    async def measure(self, case: Case, seed: int) -> dict[str, float]:
        """Tokens/s by phase."""
        torch.set_num_threads(self.num_threads)
        _give_back_memory()
        timing = await self.side.run(case, seed)
        num_decoded = case.batch_size * (case.num_output_tokens - 1)
        return {
            "prefill": case.batch_size * case.num_prompt_tokens / timing.prefill_s,
            "decode": num_decoded / max(timing.decode_s, 1e-9),
        }


def _give_back_memory() -> None:
    """What torch has freed: a gigabyte after some runs (measured)."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
        libc.malloc_trim(0)


Sides = dict[str, list[Variant]]


@dataclass(frozen=True, slots=True)
class _Model:
    """num_parameters: of the text model. facts: for the conditions."""

    num_parameters: int
    facts: dict[str, object]


def all_cases(prompt_tokens: Sequence[int], batch_sizes: Sequence[int], num_output_tokens: int) -> list[Case]:
    return [Case(prompt, batch, num_output_tokens) for prompt, batch in itertools.product(prompt_tokens, batch_sizes)]


async def bench_engine(options: EngineOptions, plan: Plan) -> Report:
    """Measure all cases.

    Raises:
        BenchFailed: vLLM doesn't run with that interpreter.
    """
    if options.vllm_python is not None and not options.vllm_python.is_file():
        raise BenchFailed(f"--vllm-python: there is no {options.vllm_python}")
    conditions = machine()
    cases = QUICK if plan.is_quick else options.cases
    checkpoint = open_checkpoint(str(options.model))
    async with contextlib.AsyncExitStack() as stack:
        sides, model = _torch_sides(checkpoint, cases, plan)
        if options.vllm_python is not None:
            vllm = VllmOptions(
                options.vllm_python,
                options.model,
                num_plain_token_ids(checkpoint),
                max(case.num_prompt_tokens + case.num_output_tokens for case in cases),
                max(case.batch_size for case in cases),
            )
            sides["vllm"], version = await _vllm_variants(stack, vllm, plan)
            model.facts["vllm"] = version
        contest = _Contest(sides, model.num_parameters, plan.runs)
        figures: dict[str, float] = {}
        for case in cases:
            figures |= await contest.measure(case)
    conditions |= {**model.facts, "runs": plan.runs, "quick": plan.is_quick, "best": contest.best}
    bars = {} if plan.is_quick else _bars(cases, figures, "vllm" in sides, model.num_parameters < SMALL_MODEL_PARAMETERS)
    return Report("engine", conditions, figures, bars)


def _torch_sides(checkpoint: Checkpoint, cases: Sequence[Case], plan: Plan) -> tuple[Sides, _Model]:
    """Our own and transformers', and what a reader should know of the model."""
    tell(f"loading {checkpoint.name} ...")
    ours = TriptychSide(checkpoint, _kv_cache_bytes(checkpoint, cases))
    loaded = TransformersModel(checkpoint)
    threads = _thread_counts(plan)

    def cached(side: GenerateSide | ForwardSide, num_threads: int) -> Variant:
        is_whole = isinstance(side, GenerateSide) and side.cache == "static"
        most_tokens = math.inf if is_whole else MAX_PIECEMEAL_BYTES / _kv_token_bytes(checkpoint)
        return Variant(f"{num_threads} threads, {side.cache} cache", side, num_threads, most_tokens)

    sides: Sides = {
        "triptych": [Variant(f"{n} threads", ours, n) for n in threads],
        "generate": [cached(GenerateSide(loaded, cache), n) for n in threads for cache in CACHES],
        "forward": [cached(ForwardSide(loaded, cache), n) for n in threads for cache in CACHES],
    }
    num_parameters = sum(parameter.numel() for parameter in loaded.model.model.language_model.parameters())
    facts: dict[str, object] = {"model": checkpoint.name, "text_parameters": num_parameters, "dtype": "float32"}
    facts |= {"torch": torch.__version__, "transformers": transformers.__version__}
    return sides, _Model(num_parameters, facts)


async def _vllm_variants(stack: contextlib.AsyncExitStack, options: VllmOptions, plan: Plan) -> tuple[list[Variant], str]:
    variants, version = [], ""
    for num_threads in _thread_counts(plan):
        tell(f"starting vLLM with {num_threads} threads (minutes) ...")
        side, version = await stack.enter_async_context(vllm_side(options, num_threads))
        variants.append(Variant(f"{num_threads} threads", side, num_threads))
    return variants, version


def _thread_counts(plan: Plan) -> list[int]:
    return [1] if plan.is_quick else sorted({1, num_cores()})


def _kv_cache_bytes(checkpoint: Checkpoint, cases: Sequence[Case]) -> int:
    """What the largest case needs: memory for more would be asked for, though never touched."""
    num_tokens = max(c.batch_size * (c.num_prompt_tokens + c.num_output_tokens + BLOCK_SLACK_TOKENS) for c in cases)
    return _kv_token_bytes(checkpoint) * num_tokens


def _kv_token_bytes(checkpoint: Checkpoint) -> int:
    text = checkpoint.config["text_config"]
    head_size = text["hidden_size"] // text["num_attention_heads"]
    return int(2 * text["num_hidden_layers"] * text["num_key_value_heads"] * head_size * torch.float32.itemsize)


@dataclass(slots=True)
class _Contest:
    """Measures case after case. best: which variants the figures are of."""

    sides: Sides
    num_parameters: int
    num_runs: int
    seeds: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    best: dict[str, str] = field(default_factory=dict)

    async def measure(self, case: Case) -> dict[str, float]:
        """Tokens/s as ROW.SIDE."""
        tell(f"{case.batch_size} prompts of {case.num_prompt_tokens} tokens ...")
        able = {side: [variant for variant in variants if variant.can(case)] for side, variants in self.sides.items()}
        chosen = {side: await self._best_variants(case, variants) for side, variants in able.items() if variants}
        medians = await alternate({side: partial(self._once, case, of) for side, of in chosen.items()}, self.num_runs)
        self.best |= {f"{_row(case, phase)}.{side}": of[phase].name for side, of in chosen.items() for phase in PHASES}
        return {f"{_row(case, phase)}.{side}": medians[side][phase] for phase in PHASES for side in chosen}

    async def _once(self, case: Case, chosen: Mapping[str, Variant]) -> Mapping[str, float]:
        """Each phase with the variant that is best for it."""
        by_name = {variant.name: variant for variant in chosen.values()}
        measured = {name: await variant.measure(case, next(self.seeds)) for name, variant in by_name.items()}
        return {phase: measured[variant.name][phase] for phase, variant in chosen.items()}

    async def _best_variants(self, case: Case, variants: Sequence[Variant]) -> dict[str, Variant]:
        """By phase, from short runs, which warm them up as well: one of each, another of those not hopelessly slow. A busy
        moment can only slow a run: the fastest counts."""
        affordable = int(TRIAL_WORK / self.num_parameters / case.batch_size)
        trial = Case(
            min(case.num_prompt_tokens, max(affordable, TRIAL_OUTPUT_TOKENS)),
            case.batch_size,
            min(case.num_output_tokens, TRIAL_OUTPUT_TOKENS),
        )
        tried = [(await variant.measure(trial, next(self.seeds)), variant) for variant in variants]
        most = {phase: max(found[phase] for found, _ in tried) for phase in PHASES}
        hopeful = [variant for found, variant in tried if any(found[phase] > most[phase] / 2 for phase in PHASES)]
        tried += [(await variant.measure(trial, next(self.seeds)), variant) for variant in hopeful]
        return {phase: max(tried, key=lambda one: one[0][phase])[1] for phase in PHASES}


def _row(case: Case, phase: str) -> str:
    return f"{phase}_tokens_per_s_prompt{case.num_prompt_tokens}_batch{case.batch_size}"


def _bars(cases: Sequence[Case], figures: Mapping[str, float], has_vllm: bool, is_small: bool) -> dict[str, Bar]:
    """A small model against vLLM; a larger one, where the forward pass is what counts, against `generate`."""
    bars: dict[str, Bar] = {}

    def add(case: Case, phase: str, other: str, limit: float) -> None:
        row = _row(case, phase)
        bars[f"{row}.triptych/{other}"] = Bar(figures[f"{row}.triptych"] / figures[f"{row}.{other}"], limit)

    for case in cases:
        if not is_small:
            add(case, "decode", "generate", 1.0)
        elif has_vllm:
            add(case, "prefill", "vllm", 1.0)
            add(case, "decode", "vllm", SMALL_DECODE_BARS.get(case.batch_size, 1.0))
    return bars
