"""Stages are forked from a template: it may die, they and their replacements live on; with the launcher all of them end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable

import pytest

from support.cluster import Cluster, wait_for
from triptych.services.launcher.child import ChildSpec
from triptych.services.launcher.template import NoTemplateError, Template

StartCluster = Callable[..., Cluster]
FORKED = ("encoder-0", "prefill-0", "decode-0", "preprocess-0")


def _parent(pid: int) -> int:
    """0 when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _pid(cluster: Cluster, name: str) -> int | None:
    for instance in cluster.status()["instances"]:
        if instance["name"] == name and instance["state"] == "ready":
            return int(instance["resources"]["pid"])
    return None


@pytest.mark.long
def test_stages_outlive_the_template_and_end_with_the_launcher(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    launcher, pids = cluster.process.pid, cluster.info["pids"]
    assert {_parent(pids[name]) for name in FORKED} == {launcher}  # so the kernel tells the launcher of their end
    os.kill(pids["template"], signal.SIGKILL)
    wait_for(lambda: _parent(pids["template"]) == 0, 10, "the end of the template")
    os.kill(pids["encoder-0"], signal.SIGKILL)  # its replacement comes from a new template, or without one
    wait_for(lambda: _pid(cluster, "encoder-0") not in (None, pids["encoder-0"]), 40, "a new encoder")
    assert _pid(cluster, "decode-0") == pids["decode-0"]
    os.kill(launcher, signal.SIGKILL)
    cluster.process.wait(10)
    wait_for(lambda: not cluster.processes(), 40, "the end of all processes of a killed launcher")


async def test_without_a_template_nothing_is_forked() -> None:
    template = Template({})
    with pytest.raises(NoTemplateError):
        await template.fork(ChildSpec("x", (), {}, fork_arguments=("--version",)), 1)


async def test_a_template_that_ends_is_no_template_any_more() -> None:
    template = Template({})
    (theirs,) = template.spec().descriptors
    asking = asyncio.create_task(template.fork(ChildSpec("x", (), {}, fork_arguments=("--version",)), 1))
    await asyncio.sleep(0)  # it has asked
    os.close(theirs)
    with pytest.raises(NoTemplateError):
        async with asyncio.timeout(10):
            await asking


async def test_an_answer_that_nobody_waits_for_is_not_taken_for_the_next_one() -> None:
    template = Template({})
    (theirs,) = template.spec().descriptors
    spec = ChildSpec("x", (), {}, fork_arguments=("--version",))
    asking = asyncio.create_task(template.fork(spec, 1))
    await asyncio.sleep(0)  # it has asked
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with socket.socket(fileno=theirs) as control:
        with contextlib.suppress(BrokenPipeError):
            control.send(b"12345")  # the pid of a fork that came too late
        with pytest.raises(NoTemplateError):
            await template.fork(spec, 1)
