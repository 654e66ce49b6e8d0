"""A replay from the first look at the target to the last line of the results; `commands.py` calls it and reports.

However it ends, conditions.json says how, and outcomes.jsonl has one line for each request that was due.
"""

from __future__ import annotations

import asyncio
import platform
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from typing import IO

import aiohttp
import msgspec
from rich.console import Console

from triptych.loadgen.replay.conditions import OUTCOMES_FILE, Conditions, write_conditions
from triptych.loadgen.replay.content import TraceContent
from triptych.loadgen.replay.exchange import Exchange, client_session
from triptych.loadgen.replay.open_loop import UNREADABLE, OpenLoop
from triptych.loadgen.replay.options import ReplayOptions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.prepare import Prepared, prepare
from triptych.loadgen.replay.progress import Live, show
from triptych.loadgen.replay.target import TargetFailed, is_there
from triptych.loadgen.replay.watchdog import Watchdog
from triptych.loadgen.traces.trace import Trace

MAX_CONNECTIONS = 65_536  # chosen: more than there are ports to connect from


async def replay(trace: Trace, options: ReplayOptions, console: Console) -> Conditions:
    """Run it, Ctrl-C included, and leave conditions and outcomes in options.out, which exists."""
    _allow_many_connections()
    conditions = _begin(trace, options)
    write_conditions(conditions, options.out)
    try:
        with (options.out / OUTCOMES_FILE).open("wb") as outcomes:
            async with client_session(dict(options.headers), options.timeout_s) as http:
                run = _Run(http, trace, options, console, outcomes)
                conditions = await run.run(conditions)
    except asyncio.CancelledError:
        conditions = replace(conditions, ended="interrupted", message="The replay was interrupted.")
        raise
    finally:
        conditions = _with_malformed(conditions, trace)
        write_conditions(conditions, options.out)
    return conditions


class _Run:
    def __init__(
        self, http: aiohttp.ClientSession, trace: Trace, options: ReplayOptions, console: Console, outcomes: IO[bytes]
    ) -> None:
        self._http = http
        self._trace = trace
        self._options = options
        self._console = console
        self._outcomes = outcomes
        self._stop = asyncio.Event()
        self._live = Live()
        self._watchdog = Watchdog(lambda: is_there(http, options.target), self._stop)

    async def run(self, conditions: Conditions) -> Conditions:
        try:
            prepared = await prepare(self._http, self._trace, self._options, self._tell)
        except TargetFailed as error:
            return replace(conditions, ended="target_unreachable", message=f"{_sentence(error)} Nothing was sent.")
        except UNREADABLE as error:
            return replace(conditions, ended="trace_broken", message=_sentence(error))
        conditions = _with_prepared(conditions, prepared)
        write_conditions(conditions, self._options.out)
        exchange = Exchange(self._http, prepared.target)
        loop = OpenLoop(exchange, prepared.content, self._options.send, self._record)
        with self._ctrl_c_stops():
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watchdog.watch())
                showing = group.create_task(show(self._live, lambda: self._line(exchange, loop), self._console, prepared.total))
                await loop.run(prepared.rows, self._stop)
                watching.cancel()
                showing.cancel()
        await self._watchdog.look_once()
        self._tell(self._line(exchange, loop))
        return self._ended(conditions, prepared, loop)

    def _record(self, outcome: RequestOutcome) -> None:
        self._outcomes.write(msgspec.json.encode(outcome) + b"\n")
        self._live.add(outcome)
        self._watchdog.see(outcome)

    def _line(self, exchange: Exchange, loop: OpenLoop) -> str:
        self._outcomes.flush()  # what was shown is kept, whatever comes
        return self._live.line(exchange.clock(), loop.num_due)

    def _ended(self, conditions: Conditions, prepared: Prepared, loop: OpenLoop) -> Conditions:
        content = prepared.content
        if isinstance(content, TraceContent) and content.num_cut:
            note = f"{content.num_cut:,} requests were longer than the model's context and were cut to fit."
            conditions = replace(conditions, notes=(*conditions.notes, note))
        conditions = replace(conditions, error_examples=loop.error_examples)
        if self._watchdog.is_dead:
            message = f"The target stopped answering: no connection could be made any more to {self._options.target}."
            return replace(conditions, ended="target_died", message=message)
        if self._stop.is_set():
            return replace(conditions, ended="interrupted", message="The replay was interrupted: this is what ran until then.")
        if loop.trace_error:
            return replace(conditions, ended="trace_broken", message=f"The trace broke off: {loop.trace_error}")
        return replace(conditions, ended="complete")

    @contextmanager
    def _ctrl_c_stops(self) -> Iterator[None]:
        """The first one ends sending, a second one everything."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_interrupt() -> None:
            if self._stop.is_set():
                task.cancel()
            self._stop.set()
            self._tell("Stopping: what runs has a few seconds to end ...")

        before = signal.getsignal(signal.SIGINT)
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)

    def _tell(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _begin(trace: Trace, options: ReplayOptions) -> Conditions:
    versions = {"triptych": metadata.version("triptych"), "aiohttp": aiohttp.__version__, "python": platform.python_version()}
    return Conditions(
        target=options.target,
        model=options.model or "",
        label="real",
        versions=versions,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        trace=trace.name,
        trace_form=trace.form,
        seed=options.send.seed,
        options=options.as_given,
        slos=options.slos,
        isolated=options.isolated,
        warm_up_s=options.send.warm_up_s,
    )


def _with_prepared(conditions: Conditions, prepared: Prepared) -> Conditions:
    return replace(
        conditions,
        model=prepared.target.model,
        label=prepared.target.label,
        versions={**conditions.versions, "server": prepared.target.version},
        tokens_per_word=None if prepared.costs is None else prepared.costs.per_word,
        isolated=prepared.isolated,
        notes=prepared.notes,
    )


def _with_malformed(conditions: Conditions, trace: Trace) -> Conditions:
    first = tuple(f"line {row.line_number}: {row.reason}" for row in trace.malformed.first)
    return replace(conditions, num_malformed_rows=trace.malformed.count, malformed_rows=first)


def _sentence(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def _allow_many_connections() -> None:
    """Each request that runs has a connection, and systems allow 1024 or fewer unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
