"""Which processes `triptych up` starts, and how: pure, from settings and counts to slot names and command lines."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from triptych.services.launcher.child import ChildSpec
from triptych.shared.environment import process_environment
from triptych.shared.errors import BadRequest
from triptych.shared.fleet import names_of
from triptych.shared.messages import InstanceId
from triptych.shared.policies.groups import ANY, Group
from triptych.shared.policies.placement import ROLES_OF, Kind, Placement
from triptych.shared.settings import PREFIX, Settings

TORCH_FREE_STAGES = ("router", "scaler")  # they start in a second; the others are forked from the template
COLOCATED: Mapping[Kind, int] = {"instance": 1}
ONE_OF_EACH: Mapping[Kind, int] = {"encoder": 1, "prefill": 1, "decode": 1}
EMULATED = "emulated-0"  # the one process of all emulated instances
MAX_PER_STAGE = 64  # chosen: a typo must not fork hundreds of processes
MAX_EMULATED = 512  # chosen: of one stage; they share a process


@dataclass(frozen=True, slots=True)
class Counts:
    """Processes per stage; engines: instances with engine roles, of each kind. groups: of each kind that has some, whose
    requests each instance is for."""

    router: int = 1
    preprocess: int = 1
    engines: Mapping[Kind, int] = field(default_factory=lambda: ONE_OF_EACH)
    groups: Mapping[Kind, tuple[Group, ...]] = field(default_factory=dict)

    @classmethod
    def placed(cls, placement: Placement, num_instances: int, router: int = 1, preprocess: int = 1) -> Counts:
        """So many instances, with the roles and groups that a policy gives them. Raises BadRequest: they are too few."""
        engines = placement.counts(num_instances)
        return cls(router, preprocess, engines, placement.groups(engines))

    @property
    def num_engine_instances(self) -> int:
        """Engine processes on this machine, which share its cores."""
        return sum(self.engines.values())


@dataclass(frozen=True, slots=True)
class PlannedSlot:
    """stage: the argument of `triptych serve`. instances: the names under which its process appears. group: whose requests it
    is for; "": anybody's."""

    name: str
    stage: str
    instances: tuple[str, ...]
    group: Group = ANY


def plan_slots(counts: Counts, is_emulated: bool = False) -> list[PlannedSlot]:
    """Slots in the order in which they are started. Emulated instances, preprocess ones too, are one slot.

    Raises:
        BadRequest: a count is out of bounds.
    """
    working = {**counts.engines, "preprocess": counts.preprocess}
    for stage, count in {"router": counts.router, **working}.items():
        most = MAX_EMULATED if is_emulated and stage != "router" else MAX_PER_STAGE
        if not 1 <= count <= most:
            raise BadRequest(f"--{stage} must be 1 to {most}, not {count}", code="bad_setting")
    if is_emulated:
        stages = ",".join(f"{stage}={count}" for stage, count in _by_group(working, counts.groups).items())
        slots = [PlannedSlot(EMULATED, stages, tuple(names_of(working)))]
    else:
        slots = list(map(instance_slot, names_of(working), _groups(working, counts.groups)))
    return [*slots, *map(instance_slot, names_of({"router": counts.router, "scaler": 1}))]


def instance_slot(name: str, group: Group = ANY) -> PlannedSlot:
    """Of one process; its kind, or stage, is the first part of its name."""
    kind = name.rpartition("-")[0]
    return PlannedSlot(name, ",".join(ROLES_OF.get(kind, (kind,))), (name,), group)


def _groups(working: Mapping[str, int], groups: Mapping[Kind, tuple[Group, ...]]) -> list[Group]:
    """Of the instances in the order of names_of."""
    return [group for kind, count in working.items() for group in sorted(groups.get(kind, (ANY,) * count))]


def _by_group(working: Mapping[str, int], groups: Mapping[Kind, tuple[Group, ...]]) -> Mapping[str, int]:
    """As `triptych serve` takes it: KIND, or KIND.GROUP."""
    kinds = (kind for kind, count in working.items() for _ in range(count))
    return Counter(f"{kind}.{group}".rstrip(".") for kind, group in zip(kinds, _groups(working, groups), strict=True))


def child_env(settings: Settings, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a stage's process: base with all settings that were chosen. Not port and name, which differ between
    processes."""
    env = {key: value for key, value in base.items() if not key.startswith(PREFIX)}
    for key, info in Settings.model_fields.items():
        value = getattr(settings, key)
        if key not in ("port", "name") and (value != info.default or key in settings.model_fields_set):
            env[PREFIX + key.upper()] = str(value)
    env["PYTHONSAFEPATH"] = "1"
    return env


def template_env(settings: Settings, temp_dir: Path) -> dict[str, str]:
    """The environment of the process that stages are forked from. One thread: an engine sets its own number."""
    own = {"TMPDIR": str(temp_dir), **process_environment(settings, is_engine=False)}
    return {**child_env(settings, os.environ), **own}


def serve_spec(slot: PlannedSlot, settings: Settings, port: int | None, instance_id: InstanceId, temp_dir: Path) -> ChildSpec:
    """How to start one stage. port: None for a free one. temp_dir: for its temporary files (torch leaves some behind)."""
    arguments: tuple[str, ...] = ("serve", slot.stage, "--name", slot.name, "--instance-id", instance_id)
    if slot.group:
        arguments += ("--group", slot.group)
    if port is not None:
        arguments += ("--port", str(port))
    return ChildSpec(
        slot.name,
        (sys.executable, "-m", "triptych.services.cli", *arguments),
        {**child_env(settings, os.environ), "TMPDIR": str(temp_dir)},
        fork_arguments=arguments if not settings.emulate and slot.stage not in TORCH_FREE_STAGES else None,
    )
