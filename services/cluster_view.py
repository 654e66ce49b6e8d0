"""What `triptych status` and `triptych drain` ask of a running cluster over the bus, and the table that people see."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from triptych.services.launcher.run_file import RunFile, list_running
from triptych.shared.bus import Bus
from triptych.shared.decision_entry import DecisionList
from triptych.shared.errors import BadRequest, InstanceLost, Overloaded
from triptych.shared.messages import (
    HEARTBEAT_SUBJECT,
    LOST_SUBJECT,
    DrainRequest,
    Heartbeat,
    StatusReply,
    StatusRequest,
)
from triptych.shared.registry import Registry
from triptych.shared.settings import Settings

LISTEN_FACTOR = 3.0  # chosen: heartbeat intervals to wait for the scaler before answering without it
ASK_TIMEOUT_S = 5.0  # chosen: a scaler answers within a millisecond
MEGABYTE = 1e6


@asynccontextmanager
async def _joined(settings: Settings) -> AsyncIterator[tuple[Bus, Registry]]:
    nats_url = settings.nats_url
    if not nats_url:
        nats_url = _choose_run(settings).nats_url
    bus = await Bus.connect(nats_url, "triptych-cli")
    try:
        registry = Registry(settings.heartbeat_timeout_s)
        for subject in (HEARTBEAT_SUBJECT, LOST_SUBJECT):
            await bus.listen(subject, lambda event: registry.on_event(event, time.monotonic()))
        yield bus, registry
    finally:
        await bus.close()


def _choose_run(settings: Settings) -> RunFile:
    """The cluster at --port when that was given, else the newest; says so when there are others.

    Raises:
        BadRequest: there is none.
    """
    runs = list_running()
    if not runs:
        raise BadRequest("no cluster runs here: start `triptych up`, or give TRIPTYCH_NATS_URL", code="no_cluster")
    urls = ", ".join(run.url for run in runs)
    if settings.port and "port" in settings.model_fields_set:
        for run in runs:
            if urlsplit(run.url).port == settings.port:
                return run
        raise BadRequest(f"no cluster has port {settings.port} here; there are: {urls}", code="no_cluster")
    if len(runs) > 1:
        sys.stderr.write(f"{len(runs)} clusters run here, newest first: {urls}. This is the newest; --port chooses.\n")
    return runs[0]


async def fetch_status(settings: Settings) -> StatusReply:
    """The scaler's answer; what we hear ourselves when there is none.

    Raises:
        BadRequest: no cluster is known.
        Overloaded: no process sends heartbeats.
    """
    async with _joined(settings) as (bus, registry):
        scalers = await registry.wait_ready(LISTEN_FACTOR * settings.heartbeat_interval_s, service="scaler")
        if scalers:
            try:
                reply = await bus.request(scalers[0].instance_id, StatusRequest(), ASK_TIMEOUT_S)
                if isinstance(reply, StatusReply):
                    return reply
            except (InstanceLost, Overloaded):
                pass  # it went away just now: what we heard ourselves is the answer
        if not registry.all():
            raise Overloaded("the NATS server answers, but no process of a cluster does", code="no_cluster")
        return StatusReply(tuple(registry.all()), 0)


async def fetch_decisions(settings: Settings) -> DecisionList:
    """The scaler's decision log.

    Raises:
        BadRequest: no cluster is known.
        Overloaded: there is no scaler, or it does not answer, or not as one of this version does.
    """
    async with _joined(settings) as (_, registry):
        scalers = await registry.wait_ready(LISTEN_FACTOR * settings.heartbeat_interval_s, service="scaler")
        if not scalers:
            raise Overloaded("no scaler sends heartbeats", code="no_cluster")
        async with httpx.AsyncClient(timeout=ASK_TIMEOUT_S, trust_env=False) as client:
            try:
                answer = (await client.get(f"{scalers[0].http_url}/v1/decisions")).raise_for_status()
            except httpx.HTTPError as error:
                raise Overloaded(f"the scaler does not answer: {error}", code="no_cluster") from error
        return read_decisions(answer.content)


def read_decisions(content: bytes) -> DecisionList:
    """Raises Overloaded when a scaler of another version answered."""
    try:
        return msgspec.json.decode(content, type=DecisionList)
    except msgspec.MsgspecError as error:
        raise Overloaded(f"the scaler is of another version: {error}", code="no_cluster") from error


@dataclass(frozen=True, slots=True)
class Drained:
    """missing: the stages that nobody works for now that the instance has left."""

    beat: Heartbeat
    missing: tuple[str, ...]


async def drain_instance(settings: Settings, target: str) -> Drained:
    """Drain an instance (by id or slot name) and wait until it has left.

    Raises:
        BadRequest: no such instance.
        Overloaded: it still works after its drain_timeout_s.
    """
    async with _joined(settings) as (bus, registry):
        await asyncio.sleep(LISTEN_FACTOR * settings.heartbeat_interval_s / 2)  # every process has been heard once
        found = [beat for beat in registry.all() if target in (beat.instance_id, beat.name)]
        if not found:
            known = ", ".join(sorted(beat.name for beat in registry.all() if beat.service != "launcher"))
            raise BadRequest(f"no instance {target!r}; there are: {known or 'none'}", code="no_such_instance")
        if found[0].service == "launcher":
            raise BadRequest("the launcher is stopped by Ctrl-C, not drained", code="no_such_instance")
        left = asyncio.Event()
        registry.on_lost(lambda instance_id: left.set() if instance_id == found[0].instance_id else None)
        await bus.request(found[0].instance_id, DrainRequest(), ASK_TIMEOUT_S)
        try:
            async with asyncio.timeout(settings.drain_timeout_s + ASK_TIMEOUT_S):
                await left.wait()
        except TimeoutError:
            raise Overloaded(f"{found[0].instance_id} still drains", code="still_draining") from None
        return Drained(found[0], _missing(found[0], registry))


def _missing(gone: Heartbeat, registry: Registry) -> tuple[str, ...]:
    others = {stage for beat in registry.all() if beat.instance_id != gone.instance_id for stage in _stages(beat)}
    return tuple(stage for stage in _stages(gone) if stage not in others)


def _stages(beat: Heartbeat) -> tuple[str, ...]:
    return tuple(beat.roles) or (beat.service,)


def print_status(status: StatusReply, console: Console) -> None:
    """One row for each process, and one for each pool of the prefix cache."""
    beats = sorted(status.instances, key=lambda beat: (beat.service, beat.name))
    counts = ("waiting", "running", "tokens", "KV free", "leases", "store MB", "memory MB", "threads", "pid")
    console.print(_table(("instance", "roles", "state"), counts, map(_row, beats)))
    pools = [row for beat in beats for row in _pool_rows(beat)]
    if pools:
        console.print()
        console.print(_table(("cache of", "pool"), ("MB", "of", "entries", "hits", "misses", "stale", "evicted"), pools))
        console.print()
    memory_mb = sum(beat.resources.pss_bytes for beat in status.instances) / MEGABYTE
    cards = {beat.model.name for beat in status.instances if beat.model is not None}
    emulations = {f", {beat.model.emulation}" for beat in status.instances if beat.model and beat.model.emulation}
    urls = sorted(beat.http_url for beat in status.instances if beat.service == "router")
    place = f" at {', '.join(urls)}" if urls else ""
    model = ", ".join(sorted(cards)) or "-"
    emulated = "".join(sorted(emulations))
    console.print(f"model {model}{emulated}{place}, {memory_mb:.0f} MB, {status.num_restarts} restarts")


def _table(names: Sequence[str], counts: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in counts:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _pool_rows(beat: Heartbeat) -> Iterator[tuple[str, ...]]:
    for name, pool in (("KV", beat.resources.kv_prefixes), ("embeddings", beat.resources.embeddings)):
        if pool is not None:
            sizes = (f"{num_bytes / MEGABYTE:.1f}" for num_bytes in (pool.num_bytes, pool.capacity_bytes))
            counts = (pool.num_entries, pool.num_hits, pool.num_misses, pool.num_stale, pool.num_evicted)
            yield (beat.instance_id, name, *sizes, *map(str, counts))


def _row(beat: Heartbeat) -> tuple[str, ...]:
    held = beat.resources
    has_kv, has_store = held.num_blocks > 0, held.tensor_store_capacity_bytes > 0
    return (
        beat.instance_id,
        (", ".join(beat.roles) or beat.service) + (f" ({beat.group})" if beat.group else ""),
        beat.state,
        str(sum(load.num_waiting for load in beat.loads)),
        str(sum(load.num_running for load in beat.loads)),
        _pending_tokens(beat),
        f"{held.num_free_blocks}/{held.num_blocks}" if has_kv else "-",
        str(held.num_leases) if has_store else "-",
        f"{held.tensor_store_bytes / MEGABYTE:.1f}" if has_store else "-",
        f"{held.pss_bytes / MEGABYTE:.0f}",
        str(held.num_threads),
        str(held.pid),
    )


def _pending_tokens(beat: Heartbeat) -> str:
    """Of each of its roles. Not of what it does besides: ends of follow-ups' prompts, what a role that it had is still at."""
    by_stage = {load.stage: load.num_pending_tokens for load in beat.loads}
    return "/".join(str(by_stage.get(stage, 0)) for stage in beat.roles or by_stage) or "-"
