"""What ends `triptych up`: signals, and for programs the end of whoever started it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.services.launcher.plan import Counts
from triptych.services.launcher.up import Up, UpInfo, UpOptions
from triptych.shared.settings import Settings

TIMEOUT_S = 20.0
SETTINGS = Settings(model="llama-3.2-11b", emulate="a100")


class Starting(Up):
    """Starts for ever, and nothing."""

    def __init__(self, folder: Path, starter_pid: int | None) -> None:
        self.told: list[str] = []
        self.has_begun = asyncio.Event()
        super().__init__(SETTINGS, UpOptions(Counts(), TIMEOUT_S, starter_pid, self.told.append), folder)

    async def _start(self) -> UpInfo:
        self.has_begun.set()
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
def _no_hangup() -> Iterator[None]:
    """As `nohup` has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


async def test_the_end_of_the_starter_is_its_own(tmp_path: Path) -> None:
    no_parent_of_ours = os.getpid()
    up = Starting(tmp_path, no_parent_of_ours)
    assert await asyncio.wait_for(up.run(), TIMEOUT_S) == 0
    assert up.told == ["stopping: the program that started this cluster has ended"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("has_starter", [True, False])
async def test_signals_end_it(tmp_path: Path, number: signal.Signals, has_starter: bool) -> None:
    up = Starting(tmp_path, os.getppid() if has_starter else None)
    running = asyncio.create_task(up.run())
    await asyncio.wait_for(up.has_begun.wait(), TIMEOUT_S)
    os.kill(os.getpid(), number)
    assert await asyncio.wait_for(running, TIMEOUT_S) == 0
    assert up.told == ["stopping: running requests may end; Ctrl-C again kills"]


@pytest.mark.usefixtures("_no_hangup")
async def test_under_nohup_a_closed_terminal_does_not(tmp_path: Path) -> None:
    up = Starting(tmp_path, None)
    running = asyncio.create_task(up.run())
    await asyncio.wait_for(up.has_begun.wait(), TIMEOUT_S)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, TIMEOUT_S) == 0
