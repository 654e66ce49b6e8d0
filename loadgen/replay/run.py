"""A replay from the first look at the target to the last line of the results; `commands.py` calls it and reports.

However it ends, conditions.json says how, and outcomes.jsonl has one line for each request that was due.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import aiohttp
from rich.console import Console

from triptych.loadgen.replay.conditions import Conditions, Ended, write_conditions
from triptych.loadgen.replay.exchange import Exchange, client_session
from triptych.loadgen.replay.findings import begun, with_prepared, with_read, with_told
from triptych.loadgen.replay.open_loop import OpenLoop
from triptych.loadgen.replay.options import ReplayOptions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.outcomes_file import OutcomesWriter
from triptych.loadgen.replay.prepare import Prepared, prepare
from triptych.loadgen.replay.progress import Live, show
from triptych.loadgen.replay.target import TargetFailed, is_there
from triptych.loadgen.replay.watchdog import Watchdog
from triptych.loadgen.traces.trace import Trace, TraceError
from triptych.shared.units import plain

MAX_CONNECTIONS = 65_536  # chosen: more than there are ports to connect from
MIN_SECRET_CHARS = 8  # of a header's words; chosen: what is shorter is in every text, and no key
INTERRUPTED = "The replay was interrupted: this is what ran until then."


async def replay(trace: Trace, options: ReplayOptions, console: Console) -> Conditions:
    """Run it, Ctrl-C included, and leave conditions and outcomes in options.out, which exists.

    Raises:
        OSError: nothing can be written there.
    """
    _allow_many_connections()
    run = _Run(trace, options, console)
    try:
        await run.run()
    except asyncio.CancelledError:
        run.end("interrupted", INTERRUPTED)
        raise
    finally:
        trace.shaping.is_stopped = True  # or the end would wait for a thread that still reads
        conditions = with_read(run.conditions, trace)
        write_conditions(conditions, options.out)
    return conditions


class _Run:
    """conditions: as far as they are known."""

    def __init__(self, trace: Trace, options: ReplayOptions, console: Console) -> None:
        self.conditions = begun(trace, options)
        self._trace = trace
        self._options = options
        self._console = console
        self._stop = asyncio.Event()
        self._is_sending = False
        self._outcomes = OutcomesWriter(options.out, self._stop)
        self._live = Live()

    async def run(self) -> None:
        with closing(self._outcomes), self._ctrl_c_stops():
            write_conditions(self.conditions, self._options.out)
            async with client_session(dict(self._options.headers), self._options.timeout_s) as http:
                try:
                    prepared = await prepare(http, self._trace, self._options, self._tell)
                except TargetFailed as error:
                    return self.end("target_unreachable", f"{_sentence(error)} Nothing was sent.")
                except TraceError as error:
                    return self.end("trace_empty", _sentence(error))
                self.conditions = with_prepared(self.conditions, prepared)
                write_conditions(self.conditions, self._options.out)
                await self._send(http, prepared)
        if self._outcomes.failure:
            self.end("results_broken", f"The results cannot be written: {self._outcomes.failure}.")

    async def _send(self, http: aiohttp.ClientSession, prepared: Prepared) -> None:
        watchdog = Watchdog(lambda: is_there(http, self._options.target), self._stop)

        def record(outcome: RequestOutcome) -> None:
            self._outcomes.write(outcome)
            self._live.add(outcome)
            watchdog.see(outcome)

        exchange = Exchange(http, prepared.target)
        loop = OpenLoop(exchange, prepared.content, self._options.send, record)
        try:
            self._is_sending = True
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watchdog.watch())
                telling = show(self._live, lambda: self._line(exchange, loop), self._console, prepared.total)
                showing = group.create_task(telling)
                await loop.run(prepared.rows, self._stop)
                watching.cancel()
                showing.cancel()
            self._is_sending = False
            await watchdog.look_once()
            self._tell(self._line(exchange, loop))
        finally:
            self.conditions = with_told(self.conditions, prepared.content, loop)
            examples = {kind: self._without_secrets(text) for kind, text in loop.error_examples.items()}
            self.conditions = replace(self.conditions, error_examples=examples)
        if watchdog.is_dead:
            message = f"The target stopped answering: no connection could be made any more to {self._options.target}."
            self.end("target_died", message)
        elif self._stop.is_set():
            self.end("interrupted", INTERRUPTED)
        else:
            self.end("complete", "")

    def end(self, ended: Ended, message: str) -> None:
        """How it went; the last word counts."""
        self.conditions = replace(self.conditions, ended=ended, message=plain(self._without_secrets(message)))

    def _without_secrets(self, text: str) -> str:
        """Servers repeat keys that they don't know, and results are shown around."""
        for secret in " ".join(self._options.headers.values()).split():
            if len(secret) >= MIN_SECRET_CHARS:
                text = text.replace(secret, "***")
        return text

    def _line(self, exchange: Exchange, loop: OpenLoop) -> str:
        self._outcomes.flush()
        return self._live.line(exchange.clock(), loop.num_due, loop.next_s)

    @contextmanager
    def _ctrl_c_stops(self) -> Iterator[None]:
        """The first one ends sending, a second one everything, as does one before or after it. A process of a script's
        background, where the system ignores Ctrl-C, can be told to stop, too."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_interrupt() -> None:
            if self._is_sending and not self._stop.is_set():
                self._tell("Stopping: what runs has a few seconds to end ...")
            else:
                task.cancel()
            self._stop.set()

        before = signal.getsignal(signal.SIGINT)
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)

    def _tell(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _sentence(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def _allow_many_connections() -> None:
    """Each request that runs has a connection, and systems allow 1024 or fewer unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
