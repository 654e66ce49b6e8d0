"""From settings to a profile: opens the engine, times its passes and the preprocessing of pictures, fits, puts together."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from triptych.services.engine_host import open_engine
from triptych.services.profiler.engine_passes import EnginePasses
from triptych.services.profiler.grid import (
    FULL,
    QUICK,
    Grid,
    Limits,
    decode_batches,
    encode_batches,
    picture_sizes,
    prefill_steps,
)
from triptych.services.profiler.pictures import photograph
from triptych.services.profiler.timing import Effort, Pass, time_passes
from triptych.shared.checkpoint import Checkpoint
from triptych.shared.cost_model.api import decode_work, encode_work, prefill_work
from triptych.shared.cost_model.fit import MIN_POINTS, fit_stage
from triptych.shared.cost_model.forms import MemoryCosts, PassWork
from triptych.shared.cost_model.images import NativeResolution
from triptych.shared.cost_model.profile import VERSION, Machine, Profile, ProfiledModel, StageProfile
from triptych.shared.cost_model.unknowns import LinkCosts
from triptych.shared.engine.api import Engine
from triptych.shared.errors import BadRequest
from triptych.shared.settings import Settings

QUICK_EFFORT = Effort(num_rounds=5, stage_budget_s=22.0)  # chosen: with loading under two minutes, four stages
FULL_EFFORT = Effort(num_rounds=11, stage_budget_s=300.0)  # chosen
MOVES, MOVED_TOKENS = 11, 2048  # chosen: less than a second, even of a large model


@dataclass(frozen=True, slots=True)
class Tools:
    """What the command brings. preprocess: decodes and resizes an encoded picture. tick: told the stage, and how many of
    its passes are still to come. clock: seconds."""

    preprocess: Callable[[bytes], object]
    tick: Callable[[str, int], None]
    clock: Callable[[], float] = time.perf_counter


def measure_profile(settings: Settings, checkpoint: Checkpoint, machine: Machine, is_quick: bool, tools: Tools) -> Profile:
    """Takes the machine for a while: at most about 1.5 minutes when quick, else 20, and the loading of the weights.

    Raises:
        BadRequest: the checkpoint or the settings can't be served.
    """
    engine = open_engine(settings, machine.num_threads)
    num_kv_tokens = engine.block_pool.num_blocks * engine.block_size
    limits = Limits.of(settings, engine.model_card.max_model_len, num_kv_tokens, checkpoint.image)
    grid, effort = (QUICK, QUICK_EFFORT) if is_quick else (FULL, FULL_EFFORT)
    engine_passes = EnginePasses(engine, checkpoint, machine.device == "cuda", tools.clock)
    passes = {
        "preprocess": _preprocess_passes(grid, settings, tools),
        "encode": _encode_passes(grid, limits, engine_passes),
        "prefill": _prefill_passes(grid, limits, engine_passes),
        "decode": _decode_passes(grid, limits, engine_passes),
    }
    _require_enough(passes)

    def profiled(stage: str) -> StageProfile:
        return fit_stage(time_passes(passes[stage], effort, lambda num_left: tools.tick(stage, num_left), tools.clock))

    return Profile(
        version=VERSION,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        machine=machine,
        model=ProfiledModel(checkpoint.name, checkpoint.revision, checkpoint.image),
        memory=_memory(engine, engine_passes, checkpoint, limits),
        preprocess=profiled("preprocess"),
        encode=profiled("encode"),
        prefill=profiled("prefill"),
        decode=profiled("decode"),
        link=_link(engine, engine_passes),
    )


def _link(engine: Engine, engine_passes: EnginePasses) -> LinkCosts:
    """One block takes the latency, a long prompt's more the time of their bytes; medians, after a warm-up."""
    num_blocks = 1 + min(MOVED_TOKENS // engine.block_size, engine.block_pool.num_blocks // 2 - 1)

    def typical_s(num_moved: int) -> float:
        return statistics.median([engine_passes.move_kv(num_moved) for _ in range(1 + MOVES)][1:])

    one_s, many_s = typical_s(1), typical_s(num_blocks)
    shape, dtype = engine.exported_shape(num_blocks - 1)
    more_s = max(many_s - one_s, many_s / 2)  # chosen: a difference less than that is noise
    return LinkCosts(one_s, dtype.itemsize * math.prod(shape) / more_s)


def _require_enough(passes: Mapping[str, Sequence[Pass]]) -> None:
    """Before minutes of measuring that nothing could be fitted to."""
    for stage, its in passes.items():
        if len(its) < MIN_POINTS:
            raise BadRequest(
                f"only {len(its)} of the passes of {stage} are small enough for these settings, {MIN_POINTS} are needed: "
                "raise kv_cache_bytes, max_prefill_tokens, max_model_len, max_image_pixels",
                code="bad_setting",
            )


def _preprocess_passes(grid: Grid, settings: Settings, tools: Tools) -> list[Pass]:
    def one(width: int, height: int) -> Pass:
        encoded = photograph(width, height)

        def run() -> float:
            began_s = tools.clock()
            tools.preprocess(encoded)
            return tools.clock() - began_s

        return Pass(PassWork(width * height), run)

    return [one(*size) for size in picture_sizes(grid, settings.max_image_pixels)]


def _encode_passes(grid: Grid, limits: Limits, engine_passes: EnginePasses) -> list[Pass]:
    rule = NativeResolution(limits.image)
    return [
        Pass(encode_work([rule.shape(batch.width, batch.height)] * batch.num_images), partial(engine_passes.encode, batch))
        for batch in encode_batches(grid, limits)
    ]


def _prefill_passes(grid: Grid, limits: Limits, engine_passes: EnginePasses) -> list[Pass]:
    return [Pass(prefill_work(step), partial(engine_passes.prefill, step)) for step in prefill_steps(grid, limits)]


def _decode_passes(grid: Grid, limits: Limits, engine_passes: EnginePasses) -> list[Pass]:
    return [Pass(decode_work(batch), partial(engine_passes.decode, batch)) for batch in decode_batches(grid, limits)]


def _memory(engine: Engine, engine_passes: EnginePasses, checkpoint: Checkpoint, limits: Limits) -> MemoryCosts:
    shape, dtype = engine.exported_shape(1)
    return MemoryCosts(
        weight_bytes=sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors")),
        kv_bytes_per_token=dtype.itemsize * math.prod(shape) // engine.block_size,
        kv_bytes_per_image_token=0,
        embedding_bytes_per_token=engine_passes.embedding_bytes_per_token(encode_batches(QUICK, limits)[0]),
        kv_capacity_bytes=dtype.itemsize * math.prod(shape) * engine.block_pool.num_blocks,
    )
