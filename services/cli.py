"""The `triptych` command. Stages, torch and rich tables are imported when a command needs them: --help is quick.

`serve` sets the thread counts of OpenMP before anything imports torch, which reads them once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import os
import platform
import secrets
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from triptych.services.setting_flags import EXTRA_ARGUMENTS, flag_of, with_settings
from triptych.shared.environment import process_environment
from triptych.shared.errors import BadRequest
from triptych.shared.machine import num_cuda_devices
from triptych.shared.messages import InstanceId, Role
from triptych.shared.policies.groups import ANY, GROUPS
from triptych.shared.policies.placement import ROLES_OF
from triptych.shared.settings import PREFIX, Settings

if TYPE_CHECKING:  # pulls in NATS, uvloop: not for --help
    from triptych.shared.service import ServiceApp

ROLES: tuple[Role, ...] = ("encoder", "prefill", "decode")
STAGES = ("router", "preprocess", *ROLES, "scaler")
EMULATED_STAGES = ("preprocess", *ROLES_OF)
STAGE_HELP = (
    f"one of {', '.join(STAGES)}; or several engine roles, as encoder,prefill,decode; "
    "or, emulated, many instances, as encoder=8,prefill=4,decode=4,preprocess=1"
)
CLIENT_SETTINGS = ("port", "nats_url", "heartbeat_interval_s", "heartbeat_timeout_s", "drain_timeout_s", "log_level")
PROFILE_SETTINGS = ("model", "emulate", "device", "dtype", "threads", "kv_cache_bytes", "max_prefill_tokens")
MAX_NAME_LENGTH = 63  # chosen: a DNS label, so a container's name fits
JsonFlag = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]
Count = Annotated[int, typer.Option(min=1, help="processes of this stage")]

app = typer.Typer(
    name="triptych",
    help="Serve vision-language models through separate, independently scaled stages.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"triptych {version('triptych')}\n")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print and exit")
    ] = False,
) -> None:
    """Options before the command."""


@app.command(context_settings=EXTRA_ARGUMENTS)
@with_settings("name")
def up(
    settings: Settings,
    router: Count = 1,
    preprocess: Count = 1,
    encoder: Count = 1,
    prefill: Count = 1,
    decode: Count = 1,
    colocated: Annotated[bool, typer.Option("--colocated", help="one process for all three engine roles")] = False,
    instances: Annotated[int, typer.Option(min=0, help="this many, with the roles that the policy gives them")] = 0,
    ready_timeout_s: Annotated[
        float, typer.Option(min=1, help="give up when not ready in time, modelled start not counted")
    ] = 600.0,
    log_dir: Annotated[Path | None, typer.Option(help="keep the logs there; default: only those of a failed start")] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="for programs: one JSON line when it is ready; it ends with the program that started it"),
    ] = False,
) -> None:
    """Start a whole cluster on this machine; Ctrl-C stops it."""
    starter_pid = os.getppid() if as_json else None  # first of all: should it end while we load the rest
    # they pull in HTTP client, NATS, uvloop: not for --help
    from triptych.services.launcher.plan import COLOCATED, ONE_OF_EACH, Counts
    from triptych.services.launcher.up import UpOptions, run_up
    from triptych.services.scaler.elastic_settings import check_elastic, with_limits
    from triptych.shared.emulation import emulated_settings, open_model, startup_s
    from triptych.shared.http_host import listening_socket, resolve_host
    from triptych.shared.policies.policy_set import FIXED, policy_set

    _need_model(settings)
    host = resolve_host(settings.bind_host)  # as is one that nothing can listen on
    if settings.port:
        listening_socket(host, settings.port).close()  # one that is taken is told now, not by a router that ends
    _log_to_terminal(settings)
    settings = emulated_settings(settings)
    if settings.device == "cuda" and not settings.emulate and not num_cuda_devices():
        raise BadRequest("device is cuda, but there is no CUDA device on this machine", code="bad_setting")
    open_model(settings)  # a wrong model fails here, once; a hub id is downloaded once
    policies = policy_set(settings.policy)  # so does a wrong policy
    ready_timeout_s += startup_s(settings)
    counts = Counts(router, preprocess, {"encoder": encoder, "prefill": prefill, "decode": decode})
    if (colocated and instances) or ((colocated or instances) and counts.engines != ONE_OF_EACH):
        reason = "--colocated is one of all roles" if colocated else "--instances says how many there are"
        raise BadRequest(f"{reason}: leave out the counts of others", code="bad_setting")
    if colocated:
        counts = Counts(router, preprocess, COLOCATED)
    elif instances:
        counts = Counts.placed(policies.placement, instances, router, preprocess)
        # who counts stages wants those, this one leaves them to the policy
        if "elastic" not in settings.model_fields_set and policies.elasticity != FIXED:
            settings = settings.model_copy(update={"elastic": "on"})
    check_elastic(settings, counts.num_engine_instances)
    settings = with_limits(settings, counts.num_engine_instances)

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):  # who read along, a terminal too, may be gone
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    raise typer.Exit(run_up(settings, UpOptions(counts, ready_timeout_s, starter_pid, tell, log_dir)))


@app.command(context_settings=EXTRA_ARGUMENTS)
@with_settings()
def serve(
    settings: Settings,
    stage: Annotated[str, typer.Argument(help=STAGE_HELP)],
    instance_id: Annotated[str, typer.Option(hidden=True, help="this life's id, given by the launcher")] = "",
) -> None:
    """Run one stage as this process, until SIGTERM."""
    from triptych.shared.emulation import emulated_settings  # the cost model: not for --help

    counts = _parse_counts(stage, settings) if "=" in stage else {}
    stages = tuple(counts) or _parse_stages(stage)
    if not settings.nats_url:
        raise BadRequest(f"serve needs a NATS server: {flag_of('nats_url')} or {PREFIX}NATS_URL", code="bad_setting")
    if stage != "scaler":
        _need_model(settings)
    settings = emulated_settings(settings)
    name = _slot_name(settings, stages)
    os.environ.update(process_environment(settings, is_engine=stages[0] in ROLES and not settings.emulate))
    if counts:
        raise typer.Exit(_run_emulated(settings, counts, InstanceId(instance_id or f"{name}-{secrets.token_hex(4)}")))
    raise typer.Exit(_run_stage(settings, stages, name, InstanceId(instance_id) if instance_id else None))


@app.command(context_settings=EXTRA_ARGUMENTS)
@with_settings(shown=CLIENT_SETTINGS)
def status(
    settings: Settings,
    as_json: JsonFlag = False,
    decisions: Annotated[bool, typer.Option("--decisions", help="why the cluster is as it is: the last decisions")] = False,
) -> None:
    """Show the processes of a running cluster: roles, queues, memory, threads; or the decisions about roles and instances."""
    import msgspec  # with rich's tables and the NATS client: not for --help

    from triptych.services.cluster_view import fetch_decisions, fetch_status, print_status
    from triptych.services.decision_view import print_decisions
    from triptych.shared.console import table_console
    from triptych.shared.decision_entry import DecisionList

    _log_to_terminal(settings)
    told = asyncio.run(fetch_decisions(settings)) if decisions else asyncio.run(fetch_status(settings))
    if as_json:
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    elif isinstance(told, DecisionList):
        print_decisions(told, table_console())
    else:
        print_status(told, table_console())


@app.command(context_settings=EXTRA_ARGUMENTS)
@with_settings(shown=CLIENT_SETTINGS)
def drain(
    settings: Settings,
    instance: Annotated[str, typer.Argument(help="instance id or slot name, as `triptych status` shows it")],
    as_json: JsonFlag = False,
) -> None:
    """Let an instance finish its work and leave."""
    from triptych.services.cluster_view import drain_instance  # pulls in rich and the NATS client: not for --help

    _log_to_terminal(settings)
    drained = asyncio.run(drain_instance(settings, instance))
    instance_id = drained.beat.instance_id
    sys.stdout.write(json.dumps({"drained": instance_id}) + "\n" if as_json else f"{instance_id} has left\n")
    for stage in drained.missing:
        sys.stderr.write(f"warning: nobody is left for {stage}; requests that need it get 503\n")


@app.command(context_settings=EXTRA_ARGUMENTS)
@with_settings(shown=PROFILE_SETTINGS)
def profile(
    settings: Settings,
    quick: Annotated[bool, typer.Option("--quick", help="fewer passes, each less often; two minutes at most")] = False,
    out: Annotated[Path | None, typer.Option(help="file to write, its plot beside it; default: MODEL.profile.json")] = None,
    load: Annotated[Path | None, typer.Option(help="measure nothing, tell what follows from this profile")] = None,
    slo_factor: Annotated[float, typer.Option(min=1, help="the SLO is the latency of a request alone times this")] = 5.0,
    as_json: JsonFlag = False,
) -> None:
    """Measure what each stage costs on this machine, and tell what follows; with --emulate: what follows for GPUs."""
    from triptych.services.preprocess.decode import DecodeOptions, decode_image  # with Pillow and rich: not for --help
    from triptych.services.profiler.command import TYPICAL, ProfileOptions, run_profile
    from triptych.services.profiler.published import choose, tell_published
    from triptych.shared.checkpoint import open_checkpoint
    from triptych.shared.emulation import check_emulation

    _need_model(settings)
    _log_to_terminal(settings)
    check_emulation(settings)
    ignored = {"--quick": quick, "--out": out is not None, "--load": load is not None and settings.emulate}
    if (settings.emulate or load) and any(ignored.values()):
        reason = "--emulate measures and loads nothing" if settings.emulate else "--load measures nothing"
        names = ", ".join(name for name, is_given in ignored.items() if is_given)
        raise BadRequest(f"{reason}: leave out {names}", code="bad_setting")
    if settings.emulate:
        tell_published(choose(settings.emulate, settings.model, TYPICAL, slo_factor), TYPICAL, as_json)
        return
    os.environ.update(process_environment(settings, is_engine=True))
    checkpoint = open_checkpoint(settings.model, settings.model_name)
    decoding = DecodeOptions(checkpoint.image, checkpoint.revision, settings.max_image_pixels)
    file = Path(f"{checkpoint.name.replace('/', '-')}.profile.json") if out is None else out
    options = ProfileOptions(quick, file, load, slo_factor, as_json)
    run_profile(settings, checkpoint, lambda encoded: decode_image(encoded, decoding, "picture"), options)


@app.command(context_settings=EXTRA_ARGUMENTS)
@with_settings()
def config(settings: Settings, as_json: JsonFlag = False) -> None:
    """Show every setting: its value, where that comes from, what it means."""
    rows = {name: _without_password(getattr(settings, name)) for name in Settings.model_fields}
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    for name, value in rows.items():
        mark = "*" if name in settings.model_fields_set else " "
        description = Settings.model_fields[name].description or ""
        shown = str(value).lower() if isinstance(value, bool) else value
        sys.stdout.write(f"{mark} {PREFIX}{name.upper()}={shown}{f'  # {description}' if description else ''}\n")
    sys.stdout.write("* set in the environment or by a flag\n")


def _log_to_terminal(settings: Settings) -> None:
    """For commands with output of their own: on stderr, and warnings only unless a level was chosen."""
    from triptych.shared.logs import configure_logs  # structlog: not for --help

    level = settings.log_level if "log_level" in settings.model_fields_set else "warning"
    configure_logs(settings.model_copy(update={"log_level": level}), "triptych")


def _need_model(settings: Settings) -> None:
    if not settings.model:
        raise BadRequest(f"which model? {flag_of('model')} PATH_OR_HUB_ID, or {PREFIX}MODEL", code="bad_setting")


def _parse_stages(text: str) -> tuple[str, ...]:
    stages = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for stage in stages:
        if stage not in STAGES:
            raise BadRequest(f"unknown stage {stage!r}; allowed: {', '.join(STAGES)}", code="unknown_stage")
        if len(stages) > 1 and stage not in ROLES:
            raise BadRequest(f"{stage} has a process of its own; only {', '.join(ROLES)} share one", code="unknown_stage")
    return stages


def _parse_counts(text: str, settings: Settings) -> dict[str, int]:
    """How many emulated instances of each stage, or kind, share this process: by KIND, or KIND.GROUP."""
    if not settings.emulate:
        raise BadRequest(f"only emulated instances share a process: {flag_of('emulate')} GPU", code="bad_setting")
    from triptych.services.launcher.plan import MAX_EMULATED  # pulls in asyncio, uvloop: not for --help

    counts: dict[str, int] = {}
    allowed = {str(count) for count in range(MAX_EMULATED + 1)}
    for part in text.split(","):
        stage, _, count = (word.strip() for word in part.partition("="))
        kind, _, group = stage.partition(".")
        if kind not in EMULATED_STAGES or group not in (ANY, *GROUPS) or stage in counts or count not in allowed:
            raise BadRequest(
                f"{part!r} is not STAGE=COUNT, each of {', '.join(EMULATED_STAGES)} once and at most {MAX_EMULATED}",
                code="unknown_stage",
            )
        counts[stage] = int(count)
    if not any(counts.values()):
        raise BadRequest("there is no instance to run", code="bad_setting")
    return counts


def _slot_name(settings: Settings, stages: tuple[str, ...]) -> str:
    """The name is part of NATS subjects: no dots, spaces or wildcards."""
    host = platform.node().partition(".")[0].lower() or "local"
    name = settings.name or f"{stages[0] if len(stages) == 1 else 'instance'}-{host}"
    if settings.name and not all(char.isalnum() or char in "-_" for char in name):
        raise BadRequest(f"name {name!r}: letters, digits, - and _ only", code="bad_setting")
    return "".join(char if char.isalnum() or char in "-_" else "-" for char in name)[:MAX_NAME_LENGTH]


def _run_stage(settings: Settings, stages: tuple[str, ...], name: str, instance_id: InstanceId | None) -> int:
    from triptych.shared.service import run_service  # pulls in NATS, uvloop: not for --help

    return run_service(name, settings, functools.partial(_make_service, stages), instance_id)


def _run_emulated(settings: Settings, counts: dict[str, int], process_id: InstanceId) -> int:
    from triptych.shared.fleet import names_of, run_fleet  # as above

    kinds: Counter[str] = Counter()
    groups: dict[str, list[str]] = {}
    for stage, count in counts.items():
        kind, _, group = stage.partition(".")
        kinds[kind] += count
        groups.setdefault(kind, []).extend([group] * count)
    each = [(kind, group) for kind in kinds for group in groups[kind]]

    def maker(kind: str, group: str) -> Callable[[Settings], ServiceApp]:
        return functools.partial(_make_service, ROLES_OF.get(kind, (kind,)), group=group)

    members = {name: maker(kind, group) for name, (kind, group) in zip(names_of(kinds), each, strict=True)}
    return run_fleet(process_id, settings, members, maker)


def _make_service(stages: tuple[str, ...], settings: Settings, group: str = "") -> ServiceApp:
    """Stages are imported here, by name: a router never loads torch, and threads are limited before an engine does."""
    if group:
        settings = settings.model_copy(update={"group": group})
    service: ServiceApp
    if stages[0] in ROLES:
        instance = importlib.import_module("triptych.services.instance")
        service = instance.make_service(settings, tuple(role for role in ROLES if role in stages))
    else:
        service = importlib.import_module(f"triptych.services.{stages[0]}.app").make_service(settings)
    return service


def _without_password(value: object) -> object:
    if isinstance(value, str) and "@" in value and (parts := urlsplit(value)).scheme:
        return parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()
    return value


def main() -> None:
    """Entry point of the `triptych` script."""
    app()


if __name__ == "__main__":
    main()
