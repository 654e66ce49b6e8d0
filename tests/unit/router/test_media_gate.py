"""How many requests with pictures go at once: open, halved when a store was full, widened slowly, first come first served."""

from __future__ import annotations

import asyncio
import math

import pytest

from triptych.services.router.media_gate import STORE_FULL, MediaGate
from triptych.shared.errors import DeadlineExceeded, InstanceLost

WAIT_S = 10.0


class Requests:
    """Requests in a gate; each stays inside until `end`."""

    def __init__(self, gate: MediaGate) -> None:
        self.gate = gate
        self.inside: list[str] = []
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, arrived_at_s: float = 0.0, timeout_s: float = WAIT_S) -> None:
        self._tasks[name] = asyncio.create_task(self._run(name, arrived_at_s, timeout_s))
        await _turns()

    async def _run(self, name: str, arrived_at_s: float, timeout_s: float) -> None:
        self._ends[name] = asyncio.get_running_loop().create_future()
        async with self.gate.turn(arrived_at_s, timeout_s):
            self.inside.append(name)
            try:
                await self._ends[name]
            finally:
                self.inside.remove(name)

    async def end(self, name: str, error: Exception | None = None) -> None:
        if error is None:
            self._ends[name].set_result(None)
            await self._tasks[name]
        else:
            self._ends[name].set_exception(error)
            with pytest.raises(type(error)):
                await self._tasks[name]
        await _turns()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._tasks[name]
        await _turns()

    async def outcome(self, name: str) -> BaseException | None:
        return (await asyncio.gather(self._tasks[name], return_exceptions=True))[0]


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def full() -> InstanceLost:
    return InstanceLost("no room", code=STORE_FULL)


@pytest.fixture
def requests() -> Requests:
    return Requests(MediaGate())


async def crowd(requests: Requests, names: str) -> None:
    for name in names:
        await requests.come(name)


async def test_it_is_open_at_first_and_stays_so(requests: Requests) -> None:
    await crowd(requests, "abcdefgh")
    assert requests.inside == list("abcdefgh")
    for name in "abcdefgh":
        await requests.end(name, InstanceLost("died") if name == "c" else None)
    assert (requests.gate.width, len(requests.gate)) == (math.inf, 0)


async def test_a_crowd_that_finds_no_room_halves_it_once(requests: Requests) -> None:
    await crowd(requests, "abcdefgh")
    await requests.end("a", full())
    assert requests.gate.width == 4
    await requests.end("b", full())
    assert requests.gate.width == 4
    await requests.come("i")
    assert "i" not in requests.inside
    for name in "cde":
        await requests.end(name)
    assert requests.inside == ["f", "g", "h", "i"]
    await requests.end("i", full())
    assert requests.gate.width == 2
    for name in "fgh":
        await requests.end(name)
    assert len(requests.gate) == 0


async def test_one_can_always_go(requests: Requests) -> None:
    for name in "ab":
        await requests.come(name)
        await requests.end(name, full())
    assert requests.gate.width == 1
    await requests.come("c")
    assert requests.inside == ["c"]
    await requests.end("c")
    assert requests.gate.width == 2


async def test_who_arrived_first_goes_first(requests: Requests) -> None:
    await requests.come("a")
    await requests.end("a", full())
    await requests.come("b", 5.0)
    await requests.come("late", 9.0)
    await requests.come("early", 1.0)
    await requests.end("b", full())
    assert requests.inside == ["early"]
    await requests.end("early")
    assert requests.inside == ["late"]
    await requests.end("late")


async def test_who_gives_up_leaves_nothing(requests: Requests) -> None:
    await requests.come("a")
    await requests.end("a", full())
    await requests.come("b")
    await requests.come("c")
    await requests.cancel("c")
    await requests.come("d", timeout_s=0.01)
    assert isinstance(await requests.outcome("d"), DeadlineExceeded)
    assert len(requests.gate) == 1
    await requests.come("e")
    await requests.cancel("b")
    assert requests.inside == ["e"]
    await requests.end("e")
    assert len(requests.gate) == 0


async def test_cancelled_in_the_moment_of_its_turn(requests: Requests) -> None:
    await requests.come("a")
    await requests.end("a", full())
    await requests.come("b")
    await requests.come("c")
    requests._ends["b"].set_result(None)
    await requests._tasks["b"]  # c has been granted its turn and has not run yet
    await requests.cancel("c")
    await requests.come("d")
    assert requests.inside == ["d"]
    await requests.end("d")
    assert len(requests.gate) == 0
