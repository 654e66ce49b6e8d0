"""`loadgen replay`: options in, a results folder with a report out."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
import uvloop
from typer import Argument, Option

from triptych.loadgen.replay.conditions import read_conditions
from triptych.loadgen.replay.open_loop import SendOptions
from triptych.loadgen.replay.options import ContentName, ReplayOptions, parse_headers, shown_options
from triptych.loadgen.replay.pictures import REUSE_FORM, SIZE_FORM, PictureOptions, parse_reuse, parse_size
from triptych.loadgen.replay.run import replay
from triptych.loadgen.replay.slo import FORM, Isolated, parse_slos
from triptych.loadgen.replay.target import API_KEY_VARIABLE, auth_headers, base_url
from triptych.loadgen.report.commands import publish
from triptych.loadgen.report.figures import num_failed
from triptych.loadgen.report.results import REPORT_FILES, ReportFailed
from triptych.loadgen.traces.open import open_trace
from triptych.loadgen.traces.trace import MAX_RATE_SCALE, PAPER_MAX_IMAGES, Trace, TraceError, TraceOptions
from triptych.loadgen.undecodable import UNDECODABLE
from triptych.shared.console import progress_console
from triptych.shared.units import plain

FAILED_STATUS, REFUSED_STATUS, INTERRUPTED_STATUS = 1, 2, 130
EXIT_STATUS = {"complete": 0, "interrupted": INTERRUPTED_STATUS}
MAX_S = 1e9  # chosen: no replay takes 30 years, and infinity is no number of JSON
Parsed = TypeVar("Parsed")

app = typer.Typer()


@app.command("replay")
def replay_command(
    context: typer.Context,
    trace: Annotated[str, Argument(help="a trace of any known form, or a workload by its name")],
    target: Annotated[str, Option(help="an OpenAI-compatible server, such as http://127.0.0.1:8000")],
    out: Annotated[Path | None, Option(help="results folder; default build/replay/TRACE-TIME")] = None,
    model: Annotated[str | None, Option(help="default: the first that the target lists")] = None,
    header: Annotated[list[str] | None, Option(help=f"'Name: value'; the key in {API_KEY_VARIABLE} is sent, too")] = None,
    seed: Annotated[int, Option(min=0, help="other seeds give other contents, which no cache has seen")] = 0,
    speed_up: Annotated[float, Option(min=1e-6, max=MAX_S, help="the trace's times are divided by it")] = 1.0,
    text_rate: Annotated[float, Option(min=0, max=MAX_RATE_SCALE, help="scale of the rate of requests without pictures")] = 1.0,
    image_rate: Annotated[float, Option(min=0, max=MAX_RATE_SCALE, help="scale of the rate of requests with pictures")] = 1.0,
    start: Annotated[float, Option(min=0, max=MAX_S, help="seconds of the trace that are left out")] = 0.0,
    duration: Annotated[float | None, Option(min=0.001, max=MAX_S, help="seconds of the trace that are replayed")] = None,
    limit: Annotated[int | None, Option(min=1, max=sys.maxsize, help="most requests")] = None,
    warm_up: Annotated[float, Option(min=0, max=MAX_S, help="seconds of the replay whose requests do not count")] = 0.0,
    image_count: Annotated[Literal["sqrt", "raw"], Option(help="Azure LMM: how its NumImages is read")] = "sqrt",
    max_images: Annotated[int, Option(min=0, help="pictures of a request; it has no more")] = PAPER_MAX_IMAGES,
    content: Annotated[ContentName, Option(help="trace: as long as in the trace; world: questions, answers checked")] = "trace",
    natural: Annotated[bool, Option("--natural", help="answers end where the model ends them, not as in the trace")] = False,
    image_size: Annotated[str | None, Option(help=f"{SIZE_FORM}; default: as --content")] = None,
    image_reuse: Annotated[str, Option(help=f"popularity of pictures: {REUSE_FORM}")] = "none",
    image_pool: Annotated[int, Option(min=1, max=1_000_000, help="different pictures, when they are reused")] = 1000,
    concurrency: Annotated[int | None, Option(min=1, help="most requests at once; others wait, and that counts")] = None,
    timeout: Annotated[float, Option(min=0.1, max=MAX_S, help="seconds from the sending of a request to its end")] = 600.0,
    cancel_rate: Annotated[float, Option(min=0, max=1, help="share of requests that the client cuts off")] = 0.0,
    slo: Annotated[list[str] | None, Option(help=f"repeatable: {FORM}")] = None,
    isolated: Annotated[int, Option(min=1, help="requests of a class sent alone before, for such factors")] = 8,
    isolated_from: Annotated[Path | None, Option(help="results folder whose isolated latencies count here, too")] = None,
) -> None:
    """Replay a trace: each request is sent when the trace has it, and its latency counts from then."""
    size = _checked("--image-size", parse_size, image_size or content)
    reuse = _checked("--image-reuse", parse_reuse, image_reuse)
    name = f"{Path(trace).name.partition('.')[0]}-{time.strftime('%Y%m%d-%H%M%S')}"
    options = ReplayOptions(
        target=_checked("--target", base_url, target),
        out=out or Path("build/replay") / name,
        model=model,
        content=content,
        is_natural=natural,
        pictures=PictureOptions(size, reuse, image_pool),
        send=SendOptions(concurrency, cancel_rate, warm_up, seed),
        timeout_s=timeout,
        headers=_checked(API_KEY_VARIABLE, auth_headers, os.environ) | _checked("--header", parse_headers, header or []),
        slos=_checked("--slo", parse_slos, slo or []),
        num_isolated=isolated,
        isolated=_checked("--isolated-from", _isolated_of, isolated_from),
        as_given=shown_options(context.params),
    )
    try:
        shape = TraceOptions(image_count, start, duration, text_rate, image_rate, speed_up, max_images, limit, seed)
        opened = open_trace(trace, shape)
    except TraceError as error:
        raise _refused(str(error)) from None
    with closing(opened):
        _checked("--out", _make_folder, options.out)
        status = _run(opened, options)
    raise typer.Exit(status)


def _run(trace: Trace, options: ReplayOptions) -> int:
    """The exit status: 0 when all was sent and something answered, 130 after Ctrl-C, 1 when target, trace or disk ended it, or
    every request failed. There is a report either way."""
    gc.freeze()  # what was imported lives on: a collection that looks at all of it would hold up the sender
    status, message = INTERRUPTED_STATUS, ""
    console = progress_console()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            conditions = runner.run(replay(trace, options, console))
        status, message = EXIT_STATUS.get(conditions.ended, FAILED_STATUS), conditions.message
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass  # the second Ctrl-C
    except OSError as error:
        status, message = FAILED_STATUS, f"The results cannot be written: {error}."
    try:
        report = publish(options.out)
        whole = report.classes[0]
        if status == 0 and num_failed(whole) and not whole.num_finished:
            kind, told = next(iter(conditions.error_examples.items()))
            status, message = FAILED_STATUS, f"Every request failed, the first one with {kind}: {told}"
    except ReportFailed as error:
        status, message = REFUSED_STATUS, f"{message}\n{error}".lstrip()
    except KeyboardInterrupt:
        status, message = INTERRUPTED_STATUS, f"No report was made; `loadgen report {options.out}` makes one."
    if message:
        console.print(plain(message), markup=False, highlight=False, soft_wrap=True)
    return status


def _refused(why: str) -> typer.Exit:
    sys.stderr.write(f"{plain(why)}\n")
    return typer.Exit(REFUSED_STATUS)


def _checked(name: str, parse: Callable[[Any], Parsed], given: object) -> Parsed:
    try:
        return parse(given)
    except (*UNDECODABLE, OSError) as error:
        raise typer.BadParameter(str(error), param_hint=name) from None


def _make_folder(folder: Path) -> None:
    """Without an earlier run's report: should this one have none, nobody is to take that for its."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in REPORT_FILES:
        (folder / name).unlink(missing_ok=True)


def _isolated_of(folder: Path | None) -> dict[str, Isolated]:
    return dict(read_conditions(folder).isolated) if folder is not None else {}
