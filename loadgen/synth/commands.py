"""`loadgen synth`: options in, a workload expanded to a trace file, what it came to out."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from triptych.loadgen.synth.fit import Made
from triptych.loadgen.synth.rows import workload_rows
from triptych.loadgen.synth.scaling import Wishes, as_wished
from triptych.loadgen.synth.workload import load_workload
from triptych.loadgen.traces.trace import TraceError
from triptych.loadgen.traces.writer import write_trace
from triptych.shared.console import progress_console, table_console
from triptych.shared.units import plain

WORKLOADS = "azure-lmm, bursts, chat-reuse, day, image-light, servegen, tides, or a .toml file of yours"

synth = typer.Typer()


@synth.command("synth")
def synth_command(
    workload: Annotated[str, typer.Argument(help=WORKLOADS)] = "azure-lmm",
    out: Annotated[
        Path | None, typer.Option(help=".csv: Azure LMM's form, .jsonl: ours, .gz packs  [default: build/NAME.csv.gz]")
    ] = None,
    duration: Annotated[float | None, typer.Option(min=1, max=1e9, help="seconds; as the workload says")] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, max=1e5, help="requests per second, in the mean")] = None,
    image_share: Annotated[float | None, typer.Option(min=0, max=1, help="share of requests with pictures")] = None,
    seed: Annotated[int | None, typer.Option(help="other seeds give other traces; as the workload says")] = None,
    steady: Annotated[
        bool, typer.Option("--steady", help="no hours, swings, surges or bursts: even a short trace has the published mix")
    ] = False,
) -> None:
    """Make a trace from a workload: the distributions of a published trace, a mix of clients, scripted bursts."""
    try:
        wished = as_wished(load_workload(workload), Wishes(duration, rate, image_share, seed, steady))
        path = out or Path("build") / f"{Path(workload).stem}.csv.gz"
        made = Made()
        rows = made.counted(workload_rows(wished))
        first = next(rows, None)
        if first is None:
            raise TraceError(f"{path}: no request in {wished.duration_s:g} s at this rate")
        with progress_console().status(Text(f"writing {path}")):
            write_trace(chain((first,), rows), path)
    except TraceError as error:
        sys.stderr.write(f"{plain(str(error))}\n")
        raise typer.Exit(2) from None
    console = table_console()
    console.print(wished.about, highlight=False, markup=False)
    console.print(made.table(wished.published))
    console.print(
        f"{made.num_rows:,} requests in {wished.duration_s:,.0f} s ({made.num_rows / wished.duration_s:.3g}/s), "
        f"{made.num_image_rows / made.num_rows:.1%} with pictures, seed {wished.seed}"
    )
    if made.has_more_than_azure and ".csv" in path.suffixes:
        console.print("Azure LMM's form has neither conversations nor tokens of pictures: name the file .jsonl to keep them.")
    console.print(plain(str(path)), soft_wrap=True, highlight=False, markup=False)
