"""SharedCores: an engine takes what those that compute leave, and what a dead one held is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.shared.engine.shared_cores import Rank, SharedCores


class Engine:
    """What processes see of each other's locks is what open files see."""

    def __init__(self, path: Path, num_cores: int, least: int = 1) -> None:
        self.num_threads: list[int] = []
        self.cores = SharedCores(path, num_cores, least, self.num_threads.append)

    def take(self) -> int:
        self.cores.take(Rank.LONG)
        return self.num_threads[-1]


def test_those_that_compute_share_the_cores(tmp_path: Path) -> None:
    first, second, third = (Engine(tmp_path / "cores", 8) for _ in range(3))
    assert first.take() == 8
    assert first.take() == 8, "its own lock is none of another"
    assert second.take() == 1, "all are taken"
    assert first.take() == 4, "a fair share"
    assert second.take() == 4
    assert third.take() == 1
    assert (first.take(), second.take(), third.take()) == (2, 2, 2)
    second.cores.leave()
    assert (first.take(), third.take()) == (4, 4)
    third.cores.close()
    assert first.take() == 8, "a dead engine holds nothing"
    assert first.num_threads == [8, 4, 2, 4, 8], "told when it changes"


def test_who_can_wait_sees_what_others_compute(tmp_path: Path) -> None:
    first, second = (Engine(tmp_path / "cores", 8) for _ in range(2))

    def seen(engine: Engine) -> list[Rank]:
        return [rank for rank in Rank if engine.cores.others_compute(rank)]

    first.cores.take(Rank.LAST)
    assert seen(second) == [Rank.LAST]
    assert second.take() == 1, "who can wait takes cores all the same"
    assert seen(first) == [Rank.LONG]
    assert seen(second) == [Rank.LAST], "its own lock is none of another"
    second.cores.take(Rank.BRIEF)
    assert seen(first) == [Rank.BRIEF]
    second.cores.rest()
    assert seen(first) == [Rank.LAST], "what follows may not hurry"
    first.cores.take_again()
    assert first.num_threads[-1] == 4, "they are kept for what follows"
    second.cores.take_again()
    assert seen(first) == [Rank.LAST], "going on is as before"
    second.take()
    assert seen(first) == [Rank.LONG]
    second.cores.leave()
    assert not seen(first)


def test_the_least_is_had_whoever_else_computes(tmp_path: Path) -> None:
    assert [Engine(tmp_path / "cores", 2, least=least).take() for least in (1, 1, 1, 2)] == [2, 1, 1, 2]


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "cores").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        SharedCores(tmp_path / "cores", 2, 1, lambda _: None)
    assert not (tmp_path / "elsewhere").exists()
