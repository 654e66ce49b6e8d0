"""Which processes `triptych up` starts, and how: pure, from settings and counts to slot names and command lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.services.launcher.child import ChildSpec
from triptych.shared.environment import process_environment
from triptych.shared.errors import BadRequest
from triptych.shared.messages import InstanceId
from triptych.shared.settings import PREFIX, Settings

ENGINE_STAGES = ("encoder", "prefill", "decode")
TORCH_FREE_STAGES = ("router", "scaler")  # they start in a second; the others are forked from the template
COLOCATED = ",".join(ENGINE_STAGES)
MAX_PER_STAGE = 64  # chosen: a typo must not fork hundreds of processes


@dataclass(frozen=True, slots=True)
class Counts:
    """Processes per stage. colocated: instances that have all three engine roles, instead of one role each."""

    router: int = 1
    preprocess: int = 1
    encoder: int = 1
    prefill: int = 1
    decode: int = 1
    colocated: bool = False


@dataclass(frozen=True, slots=True)
class PlannedSlot:
    """stage: the argument of `triptych serve`."""

    name: str
    stage: str


def plan_slots(counts: Counts) -> list[PlannedSlot]:
    """Slots in the order in which they are started.

    Raises:
        BadRequest: a count is out of bounds.
    """
    for stage in ("router", "preprocess", *ENGINE_STAGES):
        if not 1 <= getattr(counts, stage) <= MAX_PER_STAGE:
            raise BadRequest(f"--{stage} must be 1 to {MAX_PER_STAGE}, not {getattr(counts, stage)}", code="bad_setting")
    stages = ["preprocess", "router"] if counts.colocated else [*ENGINE_STAGES, "preprocess", "router"]
    slots = [PlannedSlot("instance-0", COLOCATED)] if counts.colocated else []
    slots += [PlannedSlot(f"{stage}-{index}", stage) for stage in stages for index in range(getattr(counts, stage))]
    return [*slots, PlannedSlot("scaler-0", "scaler")]


def num_engine_instances(counts: Counts) -> int:
    """Engine processes on this machine, which share its cores."""
    return 1 if counts.colocated else counts.encoder + counts.prefill + counts.decode


def child_env(settings: Settings, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a stage's process: base with all settings that differ from their default. Not port and name, which
    differ between processes."""
    env = {key: value for key, value in base.items() if not key.startswith(PREFIX)}
    for key, info in Settings.model_fields.items():
        value = getattr(settings, key)
        if key not in ("port", "name") and value != info.default:
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
    if port is not None:
        arguments += ("--port", str(port))
    return ChildSpec(
        slot.name,
        (sys.executable, "-m", "triptych.services.cli", *arguments),
        {**child_env(settings, os.environ), "TMPDIR": str(temp_dir)},
        fork_arguments=arguments if slot.stage not in TORCH_FREE_STAGES else None,
    )
