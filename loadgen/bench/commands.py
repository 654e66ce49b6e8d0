"""The subcommands of `loadgen bench`: options in, one benchmark, its report out. Torch is imported by those that need it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from triptych.loadgen.bench.models import DEMO_CHECKPOINT, checkpoint_folder
from triptych.loadgen.bench.report import Report
from triptych.loadgen.bench.runner import MIN_RUNS, BenchFailed, Plan
from triptych.loadgen.checkpoint import KINDS
from triptych.loadgen.client import AnswerFailed
from triptych.loadgen.cluster import ClusterFailed
from triptych.shared.console import table_console

NOT_MEASURED_STATUS = 2

bench = typer.Typer(
    no_args_is_help=True, help="Ours beside what else there is, in one run. Exit status: 1 when a bar does not hold."
)

Runs = Annotated[int, typer.Option(min=MIN_RUNS, help="runs of each side, in turn; medians count")]
Quick = Annotated[bool, typer.Option("--quick", help="tiny sizes, one run, no bars: does it work?")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object as the last line")]
Model = Annotated[str, typer.Option(help=f"a checkpoint's folder, or one to be made: {', '.join(KINDS)}")]

RealModel = Annotated[
    str | None, typer.Option(help="a checkpoint, as for latency: a smaller run on a real engine instead, without bars")
]


def finish(measuring: Coroutine[Any, Any, Report], as_json: bool) -> None:
    """Measure, show, and exit: 1 when a bar does not hold, 2 when it could not be measured."""
    try:
        report = asyncio.run(measuring)
    except (BenchFailed, ClusterFailed, AnswerFailed) as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(NOT_MEASURED_STATUS) from None
    report.print(table_console())
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    raise typer.Exit(0 if report.holds else 1)


@bench.command("engine")
def engine_command(
    model: Model = str(DEMO_CHECKPOINT),
    prompt_tokens: Annotated[list[int] | None, typer.Option(min=1, help="lengths of prompts; default 128 and 1024")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="prompts at once; default 1, 8 and 32")] = None,
    output_tokens: Annotated[int, typer.Option(min=2)] = 128,
    vllm_python: Annotated[Path | None, typer.Option(help="an interpreter that has vLLM for CPU, to compare with")] = None,
    runs: Runs = MIN_RUNS,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Tokens/s of prefill and decode: ours, transformers' generate, a bare forward pass, vLLM."""

    async def measuring() -> Report:
        folder = checkpoint_folder(model)
        from triptych.loadgen.bench.engine import BATCH_SIZES, PROMPT_TOKENS, EngineOptions, all_cases, bench_engine

        cases = all_cases(prompt_tokens or PROMPT_TOKENS, batch or BATCH_SIZES, output_tokens)
        return await bench_engine(EngineOptions(folder, cases, vllm_python), Plan(runs, quick))

    finish(measuring(), as_json)


@bench.command("transport")
def transport_command(runs: Runs = 15, quick: Quick = False, as_json: AsJson = False) -> None:
    """GB/s between two processes: shared memory beside a memcpy, Gloo beside a plain socket."""
    from triptych.loadgen.bench.transport import bench_transport

    finish(bench_transport(Plan(runs, quick)), as_json)


@bench.command("emulated")
def emulated_command(quick: Quick = False, as_json: AsJson = False) -> None:
    """What a large cluster costs the router, on emulated GPUs: CPU per request, memory over 10,000 requests, none lost."""
    from triptych.loadgen.bench.emulated import bench_emulated

    finish(bench_emulated(Plan(is_quick=quick)), as_json)


@bench.command("latency")
def latency_command(model: Model = str(DEMO_CHECKPOINT), quick: Quick = False, as_json: AsJson = False) -> None:
    """What the processes cost: a client's TTFT beside the bare engine's, stage by stage, and the router's CPU."""

    async def measuring() -> Report:
        folder = checkpoint_folder(model)
        from triptych.loadgen.bench.latency import bench_latency

        return await bench_latency(folder, Plan(is_quick=quick))

    finish(measuring(), as_json)


@bench.command("overlap")
def overlap_command(
    model: Annotated[str | None, typer.Option(help="a checkpoint to measure on a real engine, too, as for latency")] = None,
    runs: Runs = 30,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """TTFT of requests with many pictures: prompts that are computed as images land, beside prompts that wait for all."""

    async def measuring() -> Report:
        from triptych.loadgen.bench.overlap import bench_overlap

        return await bench_overlap(Plan(runs, quick), None if model is None else checkpoint_folder(model))

    finish(measuring(), as_json)


@bench.command("migration")
def migration_command(model: Model = "bench", runs: Runs = 15, quick: Quick = False, as_json: AsJson = False) -> None:
    """The pause of a stream that goes on at another instance, beside computing its prompt; how soon roles switch."""

    async def measuring() -> Report:
        folder = checkpoint_folder(model)
        from triptych.loadgen.bench.migration import bench_migration

        return await bench_migration(folder, Plan(runs, quick))

    finish(measuring(), as_json)


@bench.command("policy")
def policy_command(model: RealModel = None, quick: Quick = False, as_json: AsJson = False) -> None:
    """Policy sets on eight emulated instances each: text during bursts of pictures, goodput, hardly any pictures."""

    async def measuring() -> Report:
        from triptych.loadgen.bench.policy import bench_policy

        return await bench_policy(Plan(is_quick=quick), None if model is None else checkpoint_folder(model))

    finish(measuring(), as_json)


@bench.command("elastic")
def elastic_command(model: RealModel = None, quick: Quick = False, as_json: AsJson = False) -> None:
    """Policy sets that move their instances beside fixed splits of eight: a day in an hour of measuring, a steady mix."""

    async def measuring() -> Report:
        from triptych.loadgen.bench.elastic import bench_elastic

        return await bench_elastic(Plan(is_quick=quick), None if model is None else checkpoint_folder(model))

    finish(measuring(), as_json)


@bench.command("autoscale")
def autoscale_command(quick: Quick = False, as_json: AsJson = False) -> None:
    """GPU-seconds of a day whose load swings: ours, a monolith scaled by the same rule, as many as the peak needs."""
    from triptych.loadgen.bench.autoscale import bench_autoscale

    finish(bench_autoscale(Plan(is_quick=quick)), as_json)


@bench.command("cache")
def cache_command(
    model: Annotated[
        list[str] | None, typer.Option(help="as above; default bench and the demo's; the bars are of the first")
    ] = None,
    runs: Runs = 30,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """TTFT of a request with pictures when all of it is known, its beginning, or its pictures, beside the first time."""

    async def measuring() -> Report:
        from triptych.loadgen.bench.cache import bench_cache

        return await bench_cache(
            [checkpoint_folder(one) for one in model or ("bench", str(DEMO_CHECKPOINT))], Plan(runs, quick)
        )

    finish(measuring(), as_json)


@bench.command("cluster")
def cluster_command(
    vllm_python: Annotated[Path, typer.Option(help="an interpreter that has vLLM for CPU, to compare with")],
    model: Model = "bench",
    rate: Annotated[list[float] | None, typer.Option(min=0.01, help="requests/s; default: up to two past vLLM's knee")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Ours beside `vllm serve`: latencies and goodput of conversations about pictures, half of which are known."""

    async def measuring() -> Report:
        from triptych.loadgen.bench.cluster import ClusterOptions, bench_cluster

        return await bench_cluster(
            ClusterOptions(checkpoint_folder(model), vllm_python, tuple(rate or ())), Plan(is_quick=quick)
        )

    finish(measuring(), as_json)
