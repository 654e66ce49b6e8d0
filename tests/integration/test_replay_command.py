"""The command `loadgen replay` as a user runs it: Ctrl-C, a target that is not there, a file that is no trace."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from support.stub_target import MODEL, Reply, StubTarget
from triptych.loadgen.replay.conditions import read_conditions
from triptych.loadgen.report.results import PAGE_FILE, read_report
from triptych.loadgen.traces.own import own_line
from triptych.loadgen.traces.row import TraceRow

TIMEOUT_S = 100.0  # starting Python and importing, on a loaded machine


def trace_of(rows: Iterable[TraceRow], folder: Path) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(f"{own_line(row)}\n" for row in rows))
    return file


async def start(*arguments: str, output: int = asyncio.subprocess.PIPE) -> asyncio.subprocess.Process:
    """output: where what it prints goes."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "triptych.loadgen.cli",
        "replay",
        *arguments,
        stdout=output,
        stderr=output,
        env={**os.environ, "PYTHONSAFEPATH": "1", "OPENAI_API_KEY": "hush"},
    )


async def end(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, error = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    return process.returncode, out.decode(), error.decode()


async def test_ctrl_c_ends_sending_and_reports_what_ran(tmp_path: Path) -> None:
    """What runs has a few seconds: all but the requests that never end come to theirs."""
    trace = trace_of((TraceRow(0.01 * i, 20, 3 if i == 5 else 2) for i in range(60_000)), tmp_path)

    def answer(body: dict[str, object]) -> Reply:
        return Reply(["x"], 0.05, ending="hang" if body["max_tokens"] == 3 else "done")

    out = tmp_path / "out"
    async with StubTarget(answer) as stub:
        process = await start(str(trace), "--target", f"{stub.url}/v1/", "--out", str(out))
        await stub.until(lambda: len(stub.received) > 30, TIMEOUT_S)
        process.send_signal(signal.SIGINT)
        status, shown, error = await end(process)
        num_sent = sum(received.body["max_tokens"] != 1 for received in stub.received)
        assert all("Bearer hush" in received.headers for received in stub.received)
    assert status == 130, error
    assert "interrupted" in error
    assert "requests" in shown
    report = read_report(out)
    assert report.classes[0].num_requests + report.classes[0].num_unfinished == num_sent
    assert (report.classes[0].num_unfinished, report.classes[0].num_cancelled) == (1, 0)
    assert any("1 requests had not ended when the replay did" in warning for warning in report.warnings)
    assert report.classes[0].errors == {}
    assert read_conditions(out).ended == "interrupted"
    assert (out / PAGE_FILE).stat().st_size > 1000
    assert not any("hush" in path.read_text() for path in out.iterdir())


async def test_a_second_ctrl_c_ends_at_once_and_forgets_nothing(tmp_path: Path) -> None:
    trace = trace_of((TraceRow(0.01 * i, 20, 2) for i in range(60_000)), tmp_path)

    def answer(body: dict[str, object]) -> Reply:
        return Reply(["x"], ending="done" if body["max_tokens"] == 1 else "hang")

    out = tmp_path / "out"
    async with StubTarget(answer) as stub:
        process = await start(str(trace), "--target", stub.url, "--out", str(out))
        await stub.until(lambda: len(stub.received) > 10, TIMEOUT_S)
        assert process.stderr is not None
        for awaited in (b"Stopping", b""):
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.stderr.readuntil(awaited or b"\n"), TIMEOUT_S)
        status, shown, error = await end(process)
    assert status == 130, error
    assert "Traceback" not in error
    assert "requests" in shown
    conditions = read_conditions(out)
    assert (conditions.ended, conditions.model, conditions.versions["server"]) == ("interrupted", MODEL, "1.2.3")
    whole = read_report(out).classes[0]
    assert whole.num_requests == 0
    assert whole.num_unfinished > 0


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN])
async def test_ctrl_c_before_anything_is_sent(inherited: Any, tmp_path: Path) -> None:
    """SIG_IGN: as a shell has it for what a script starts in its background."""
    trace, out = trace_of([TraceRow(0.0, 20, 2)], tmp_path), tmp_path / "out"
    async with StubTarget(lambda _: Reply(ending="hang")) as stub:
        before = signal.signal(signal.SIGINT, inherited)
        process = await start(str(trace), "--target", stub.url, "--out", str(out))
        signal.signal(signal.SIGINT, before)
        await stub.until(lambda: len(stub.received) > 0, TIMEOUT_S)
        process.send_signal(signal.SIGINT)
        status, _, error = await end(process)
    assert status == 130, error
    assert "Traceback" not in error
    assert read_conditions(out).ended == "interrupted"
    assert read_report(out).classes[0].num_requests == 0


async def test_who_reads_may_go_away(tmp_path: Path) -> None:
    """As in `loadgen replay ... 2>&1 | head -1`."""
    trace, out = trace_of((TraceRow(0.01 * i, 20, 2) for i in range(5)), tmp_path), tmp_path / "out"
    reader, writer = os.pipe()
    async with StubTarget() as stub:
        process = await start(str(trace), "--target", stub.url, "--out", str(out), output=writer)
        os.close(writer)
        assert await asyncio.wait_for(asyncio.to_thread(os.read, reader, 1), TIMEOUT_S)
        os.close(reader)
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0
    assert read_report(out).classes[0].num_finished == 5
    assert (out / PAGE_FILE).stat().st_size > 1000


async def test_a_run_without_an_answer_has_failed(tmp_path: Path) -> None:
    trace, out = trace_of((TraceRow(0.01 * i, 20, 2) for i in range(5)), tmp_path), tmp_path / "out"
    async with StubTarget(lambda body: Reply(status=200 if body["max_tokens"] == 1 else 503)) as stub:
        status, _, error = await end(await start(str(trace), "--target", stub.url, "--out", str(out)))
    assert status == 1, error
    assert error.splitlines()[-1] == "Every request failed, the first one with http_503: refused with 503"
    assert read_report(out).classes[0].errors == {"http_503": 5}


async def test_no_target_still_has_a_report(tmp_path: Path) -> None:
    trace = trace_of([TraceRow(0.0, 20, 2)], tmp_path)
    async with StubTarget() as stub:
        pass
    status, _, error = await end(await start(str(trace), "--target", stub.url, "--out", str(tmp_path / "out")))
    assert status == 1, error
    assert f"No server answers at {stub.url}" in error
    assert "Traceback" not in error
    assert read_report(tmp_path / "out").classes[0].num_requests == 0


async def test_no_trace(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    status, _, error = await end(await start(str(tmp_path / "x.csv"), "--target", "http://127.0.0.1:1"))
    assert status == 2
    assert "x.csv" in error
    assert len(error.splitlines()) == 1, error
