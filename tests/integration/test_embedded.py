"""The servers that `triptych up` brings along, and a port that somebody else took first."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from triptych.services.launcher import embedded
from triptych.services.launcher.child_log import ChildLog
from triptych.services.launcher.embedded import EmbeddedValkey, free_port
from triptych.services.launcher.local import LocalLauncher, Slot

TIMEOUT_S = 30.0


@pytest.fixture
async def launcher() -> AsyncIterator[LocalLauncher]:
    made = LocalLauncher(lambda slot, status: None)
    yield made
    await made.stop([EmbeddedValkey.name], 10)


async def start(launcher: LocalLauncher, folder: Path) -> EmbeddedValkey:
    server = EmbeddedValkey(folder)
    log = ChildLog(server.name, folder / "valkey.log", logging.CRITICAL, lambda line: None)
    child = await launcher.start(Slot(server.name, lambda _: server.spec(), log, is_own=True))
    await asyncio.wait_for(server.wait_ready(child.pid), TIMEOUT_S)
    return server


async def test_a_port_that_was_taken_meanwhile(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took it listens and says nothing, so that it could be mistaken for a server that is slow."""
    with socket.create_server(("127.0.0.1", 0)) as thief:
        taken = thief.getsockname()[1]
        ports = itertools.chain([taken], iter(free_port, None))
        monkeypatch.setattr(embedded, "free_port", lambda: next(ports))
        server = await start(launcher, tmp_path)
    assert urlsplit(server.url).port not in {None, 0, taken}


async def test_once_it_has_answered_it_keeps_its_port(launcher: LocalLauncher, tmp_path: Path) -> None:
    """Clients know it by then."""
    server = await start(launcher, tmp_path)
    url = server.url
    server.spec()
    assert server.url == url
