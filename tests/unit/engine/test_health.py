"""An engine is given up after so many calls in a row of which nothing came."""

from __future__ import annotations

from triptych.shared.engine.health import EngineHealth
from triptych.shared.errors import InternalError

BROKEN = RuntimeError("device lost")


class Ends:
    def __init__(self) -> None:
        self.count = 0
        self.health = EngineHealth(3, self.give_up)

    def give_up(self) -> None:
        self.count += 1


def test_calls_in_a_row_that_all_fail() -> None:
    ends = Ends()
    for _ in range(2):
        ends.health.note([BROKEN, BROKEN])
    assert ends.count == 0
    for _ in range(5):
        ends.health.note([BROKEN])
    assert ends.count == 1, "once"


def test_a_result_is_a_clean_record() -> None:
    ends = Ends()
    for outcomes in ([BROKEN], [BROKEN], [BROKEN, 7], [BROKEN], [None], [BROKEN], [BROKEN]):
        ends.health.note(outcomes)
    assert ends.count == 0


def test_what_an_engine_refuses_tells_nothing() -> None:
    ends = Ends()
    refused = InternalError("an image's grid doesn't fit")
    for outcomes in ([refused] * 2, [refused], [refused], [], [BROKEN], [refused], [BROKEN, refused], [BROKEN]):
        ends.health.note(outcomes)
    assert ends.count == 1
