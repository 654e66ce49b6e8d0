"""`triptych up`: quick to start, modest in memory, on loopback only, and gone without a trace when told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.cases import chat, random_case
from support.client import ask, session
from support.cluster import Cluster, wait_for
from support.raw_client import RawClient
from support.reference import Reference

MAX_READY_S = 30.0  # the acceptance bound, on 2 cores
MAX_PSS_BYTES = 3_000_000_000  # the acceptance bound, tiny checkpoint
GONE_WITHIN_S = 15.0  # chosen: noticed within half a second, and then as on SIGTERM


def pss_bytes(process: psutil.Process) -> int:
    """Proportional set size: shared pages count once over all who share them."""
    for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no Pss of {process}")


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    return [
        (connection.laddr.ip, connection.laddr.port)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN or (connection.type.name == "SOCK_DGRAM" and not connection.raddr)
    ]


def test_it_starts_quickly_and_is_small(shared_cluster: Cluster, reference: Reference) -> None:
    """Small even after all that the other tests did to it."""
    cluster = shared_cluster
    assert cluster.is_ready()
    lines = (cluster.folder / "out").read_text().splitlines()
    assert len(lines) == 1, "a program that starts a cluster reads one line"
    assert {"url", "nats_url", "redis_url", "ready_s", "pss_bytes"} <= set(json.loads(lines[0]))
    assert 0 < cluster.info["ready_s"] < MAX_READY_S
    case = random_case(4000, num_pictures=4)
    asyncio.run(_answers(cluster, reference, [case] * 8))
    total_bytes = sum(pss_bytes(process) for process in cluster.processes())
    told_bytes = cluster.info["pss_bytes"]
    print(f"ready after {cluster.info['ready_s']:.1f} s; {told_bytes / 1e6:.0f} MB then, {total_bytes / 1e6:.0f} MB now")
    assert total_bytes < MAX_PSS_BYTES
    assert total_bytes / 4 < told_bytes < MAX_PSS_BYTES


async def _answers(cluster: Cluster, reference: Reference, cases: list) -> None:  # type: ignore[type-arg]
    async with session() as http, asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(http, cluster.url, case)) for case in cases]
    assert all(reference.judge(case, task.result()) == "equal" for case, task in zip(cases, tasks, strict=True))


def test_nothing_listens_beyond_loopback(shared_cluster: Cluster) -> None:
    ports = {(process.name(), *address) for process in shared_cluster.processes() for address in listening(process)}
    assert len(ports) >= 8, f"six services, NATS and Valkey listen; seen: {sorted(ports)}"
    assert {ip for _, ip, _ in ports} <= {"127.0.0.1", "::1"}, sorted(ports)


def test_status_tells_of_every_process(shared_cluster: Cluster) -> None:
    status = shared_cluster.status()
    instances = {instance["name"]: instance for instance in status["instances"]}
    assert {name.split("-")[0] for name in instances} == {"router", "preprocess", "encoder", "prefill", "decode", "scaler"}
    pids = {process.pid for process in shared_cluster.processes()}
    for instance in instances.values():
        assert instance["state"] == "ready"
        assert instance["resources"]["pid"] in pids
        assert instance["resources"]["num_threads"] >= 1
        assert instance["resources"]["pss_bytes"] > 1_000_000


def test_a_wrong_setting_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="TRIPTYCH_NONSENSE"):
        Cluster(tiny_checkpoint, tmp_path, env={"TRIPTYCH_NONSENSE": "1"})


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no-such-model"):
        Cluster(tmp_path / "no-such-model", tmp_path / "run")


def test_a_port_that_is_taken_is_told_before_anything_starts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"can't listen on 127.0.0.1 port {port}") as failed:
            Cluster(tiny_checkpoint, tmp_path, args=["--port", str(port)])
    assert "logs:" not in str(failed.value), "processes were started"


def test_the_logs_of_a_failed_start_stay(tiny_checkpoint: Path, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("triptych")), "up", "--port", "0", "--ready-timeout-s", "1"]
    done = subprocess.run(
        [*command, "--model", str(tiny_checkpoint)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "not ready after 1 s" in done.stderr
    [logs] = tmp_path.glob("triptych-up-*/*")
    assert f"logs: {logs}" in done.stderr
    assert list(logs.glob("*.log"))


@pytest.mark.timeout(180)
async def test_ctrl_c_leaves_nothing(demo_cluster: Cluster) -> None:
    """In the middle of work, too: no process, no listener, no file."""
    cluster = demo_cluster
    processes = cluster.processes()
    assert len(processes) >= 9
    ports = {address for process in processes for address in listening(process)}
    fields = {"model": cluster.info["model"], "stream": True, "ignore_eos": True}
    clients = [await RawClient.post(cluster.url, chat(f"Go on {i}", max_tokens=200).body(**fields)) for i in range(6)]
    for client in clients:
        await client.read_chunks(1)
    exit_code = await asyncio.to_thread(cluster.stop, signal.SIGINT)
    for client in clients:
        client.cut()
    assert exit_code == 0, cluster.log()
    left = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left
    still = {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert not ports & still
    assert not list(cluster.temp_dir.rglob("*")), "files were left in the temporary folder"
    assert "Traceback" not in cluster.log()


def test_a_cluster_ends_with_the_program_that_started_it(shared_cluster: Cluster) -> None:
    """Which is killed, and can't stop it."""
    assert len(shared_cluster.processes()) >= 12, "starter, up, two servers, template, six services, decode workers"
    shared_cluster.process.kill()
    shared_cluster.process.wait(10)
    wait_for(lambda: not shared_cluster.processes(), GONE_WITHIN_S, "the end of all processes of a killed starter")
