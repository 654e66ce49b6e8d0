"""What is shown of a replay while it runs: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.progress import Live, show


def outcome(error: str | None = None, is_right: bool | None = None) -> RequestOutcome:
    first_s = None if error else 1.25
    return RequestOutcome(0, "text", 0, 1.0, 1.002, 2.0, first_token_s=first_s, error=error, is_right=is_right)


def test_what_is_said() -> None:
    live = Live()
    assert live.line(0.2, 0) == "0 s: 0 due, 0 running, 0 answered"
    for one in (outcome(), outcome(is_right=True), outcome(is_right=False), outcome("http_503"), outcome("timeout")):
        live.add(one)
    assert live.line(12.3, 1007) == (
        "12 s: 1,007 due, 1,002 running, 3 answered, 1 http_503, 1 timeout, 50.0% of answers right, "
        "TTFT p50 0.25 s p99 0.25 s, send lag p99 2.0 ms"
    )
    assert live.line(12.3, 1007, 22.0).endswith("2.0 ms")
    assert live.line(12.3, 1007, 5012.3).endswith("2.0 ms, nothing is due for 5,000 s")


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_where_it_is_shown(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """tell is asked again and again until the showing is cancelled."""
    monkeypatch.setattr("triptych.loadgen.replay.progress.LINE_EVERY_S", 0.01)
    monkeypatch.setattr("triptych.loadgen.replay.progress.REDRAW_EVERY_S", 0.01)
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=100)
    told = 0
    is_enough = asyncio.Event()

    def tell() -> str:
        nonlocal told
        told += 1
        if told > 3:
            is_enough.set()
        return f"line {told} [of many]"

    showing = asyncio.create_task(show(Live(), tell, console, total=10))
    await asyncio.wait_for(is_enough.wait(), 30)
    showing.cancel()
    await asyncio.wait({showing})
    assert "line 2 [of many]" in file.getvalue()
    assert ("\x1b[" in file.getvalue()) == is_terminal
    assert (file.getvalue().splitlines()[:2] == ["line 1 [of many]", "line 2 [of many]"]) != is_terminal
