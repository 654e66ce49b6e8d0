"""SLOs: how they are written, and what they come to in seconds."""

from __future__ import annotations

import pytest

from triptych.loadgen.replay.slo import Bound, Isolated, LatencyLine, Limits, Slo, class_wide, own_scaled, parse_slos

ISOLATED = Isolated(8, ttft_s=1.0, ttft_line=LatencyLine(0.5, 0.001), tbt_s=0.02, tbt_line=LatencyLine(0.02, 0.0))


def test_how_they_are_written() -> None:
    slos = parse_slos(["image:ttft=5x", "ttft=2s,tbt=100ms", "text:tbt=.5x"])
    assert slos == {"text": Slo(Bound(2.0), Bound(0.5, True)), "image": Slo(Bound(5.0, True), Bound(0.1))}
    assert parse_slos(["text:ttft=2s", "text:tbt=1s"]) == {"text": Slo(Bound(2.0), Bound(1.0))}
    assert parse_slos(["ttft=2"]) == dict.fromkeys(("text", "image"), Slo(Bound(2.0)))
    assert parse_slos(["tbt=100ms"])["text"].tbt == Bound(0.1)
    assert parse_slos([]) == {}


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=-1", "ttft=0", "e2e=1", "video:ttft=1", "ttft=1,", "ttft=5 x", f"ttft={10**400}"]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="image:ttft=5x"):
        parse_slos([text])


@pytest.mark.parametrize("texts", [["ttft=1s,ttft=2s"], ["ttft=1s", "ttft=2s"], ["text:tbt=1s", "text:tbt=1s"]])
def test_nothing_is_bounded_twice(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="bounded twice"):
        parse_slos(texts)


def test_class_wide() -> None:
    slo = Slo(Bound(5, is_factor=True), Bound(0.1))
    assert class_wide(slo, ISOLATED) == Limits(5.0, 0.1)
    assert class_wide(slo, None) == Limits(None, 0.1)


def test_own_scaled_by_size() -> None:
    """A request of 1500 tokens takes 2 s alone, twice as long as the median."""
    assert own_scaled(Slo(Bound(5, is_factor=True), Bound(3, is_factor=True)), ISOLATED, 1500) == Limits(10.0, 0.06)
    assert own_scaled(Slo(Bound(1.5), Bound(0.1)), ISOLATED, 1500) == Limits(3.0, 0.1)
    assert own_scaled(Slo(Bound(1.5)), ISOLATED, 0) is None
    assert own_scaled(Slo(Bound(1.5)), None, 1500) is None


def test_which_need_isolated_latencies() -> None:
    assert Slo(None, Bound(1, True)).needs_isolated
    assert not Slo(Bound(1), Bound(1)).needs_isolated
    assert not Slo().needs_isolated
