"""What `triptych status` shows of a cluster: queues by stage, and the pools of the prefix cache where there are any."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from triptych.services.cluster_view import print_status, read_decisions
from triptych.shared.errors import Overloaded
from triptych.shared.instance_info import PoolStats, Resources, StageLoad
from triptych.shared.messages import Heartbeat, InstanceId, Role, StatusReply


def beat(name: str, roles: tuple[Role, ...], loads: tuple[StageLoad, ...], resources: Resources) -> Heartbeat:
    service = "instance" if roles else "router"
    return Heartbeat(InstanceId(f"{name}-ab"), name, service, "ready", roles, "http://x", 1.0, "h", loads, resources)


def shown(*beats: Heartbeat) -> list[list[str]]:
    """The words of each line."""
    out = io.StringIO()
    print_status(StatusReply(beats, 2), Console(file=out, width=200))
    return [line.split() for line in out.getvalue().splitlines()]


ROUTER = beat("router-0", (), (StageLoad("router", 0, 3),), Resources(7, 1))


def test_pending_tokens_are_told_by_stage() -> None:
    loads = (StageLoad("encoder", 1, 2, 300), StageLoad("prefill", 0, 1, 40), StageLoad("decode", 0, 5, 999))
    both = beat("all-0", ("encoder", "prefill", "decode"), loads, Resources(8, 1, num_blocks=10, num_free_blocks=4))
    lines = shown(ROUTER, both)
    [row] = [line for line in lines if line[:1] == ["all-0-ab"]]
    assert row[4:9] == ["ready", "1", "8", "300/40/999", "4/10"]
    assert not [line for line in lines if line[:1] == ["cache"]], "nothing is cached"
    assert lines[-1][-2:] == ["2", "restarts"]


def test_a_host_of_follow_ups_tells_of_its_one_role() -> None:
    loads = (StageLoad("prefill", 0, 1, 12), StageLoad("decode", 0, 5, 999))
    [row] = [
        line for line in shown(ROUTER, beat("decode-0", ("decode",), loads, Resources(8, 1))) if line[:1] == ["decode-0-ab"]
    ]
    assert row[2:6] == ["ready", "0", "6", "999"]


def test_pools_have_a_row_each() -> None:
    kv = PoolStats(2_500_000, 10_000_000, num_entries=12, num_hits=5, num_misses=6, num_stale=1, num_evicted=2)
    resources = Resources(8, 1, kv_prefixes=kv, embeddings=PoolStats(capacity_bytes=1_000_000))
    lines = shown(ROUTER, beat("text-0", ("prefill", "decode"), (), resources))
    [head] = [i for i, line in enumerate(lines) if line[:2] == ["cache", "of"]]
    assert lines[head + 1] == ["text-0-ab", "KV", "2.5", "10.0", "12", "5", "6", "1", "2"]
    assert lines[head + 2] == ["text-0-ab", "embeddings", "0.0", "1.0", "0", "0", "0", "0", "0"]


@pytest.mark.parametrize("content", [b"[]", b"nothing", b'{"policy": "p", "elastic": "on"}'])
def test_decisions_of_another_version_are_one_line(content: bytes) -> None:
    with pytest.raises(Overloaded, match="the scaler is of another version"):
        read_decisions(content)
