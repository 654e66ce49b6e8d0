"""Which processes `triptych up` starts, and with what environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from triptych.services.launcher.plan import (
    COLOCATED,
    MAX_PER_STAGE,
    ONE_OF_EACH,
    Counts,
    PlannedSlot,
    child_env,
    plan_slots,
    serve_spec,
)
from triptych.shared.errors import BadRequest
from triptych.shared.messages import InstanceId
from triptych.shared.policies.policy_set import policy_set
from triptych.shared.settings import Settings, load_settings


def test_one_of_each_by_default() -> None:
    assert [slot.name for slot in plan_slots(Counts())] == [
        "encoder-0",
        "prefill-0",
        "decode-0",
        "preprocess-0",
        "router-0",
        "scaler-0",
    ]


def test_counts_and_colocation() -> None:
    names = [slot.name for slot in plan_slots(Counts(router=2, engines={**ONE_OF_EACH, "encoder": 3}))]
    assert {"router-1", "encoder-2"} <= set(names)
    assert len(names) == 9
    colocated = Counts(engines=COLOCATED)
    assert PlannedSlot("instance-0", "encoder,prefill,decode", ("instance-0",)) in plan_slots(colocated)
    assert len(plan_slots(colocated)) == 4
    assert (Counts(engines={**ONE_OF_EACH, "encoder": 2}).num_engine_instances, colocated.num_engine_instances) == (4, 1)


def test_emulated_instances_share_a_process() -> None:
    slots = plan_slots(Counts(engines={**ONE_OF_EACH, "encoder": 2, "decode": 100}), is_emulated=True)
    assert [slot.name for slot in slots] == ["emulated-0", "router-0", "scaler-0"]
    assert slots[0].stage == "encoder=2,prefill=1,decode=100,preprocess=1"
    assert slots[0].instances[:3] == ("encoder-0", "encoder-1", "prefill-0")
    assert len(slots[0].instances) == 104
    assert plan_slots(Counts(engines=COLOCATED), is_emulated=True)[0].stage == "instance=1,preprocess=1"


def test_a_policy_places_instances() -> None:
    slots = plan_slots(Counts(engines=policy_set("modserve").placement.counts(3)))
    assert [slot.stage for slot in slots[:3]] == ["prefill,decode", "prefill,decode", "encoder"]
    assert [slot.name for slot in slots[:3]] == ["text-0", "text-1", "encoder-0"]
    emulated = plan_slots(Counts.placed(policy_set("triptych").placement, 8, preprocess=2), is_emulated=True)[0]
    assert emulated.stage == "prompt=6,text.text=2,preprocess=2"


def test_groups_are_told_to_each_instance() -> None:
    counts = Counts(engines={"encoder": 1, "text": 3}, groups={"text": ("text", "multimodal", "text")})
    slots = plan_slots(counts)
    assert [(slot.name, slot.group) for slot in slots[:5]] == [
        ("encoder-0", ""),
        ("text-0", "multimodal"),
        ("text-1", "text"),
        ("text-2", "text"),
        ("preprocess-0", ""),
    ]
    spec = serve_spec(slots[1], Settings(model="m"), None, InstanceId("text-0-ab"), Path("tmp"))
    assert spec.command[-2:] == ("--group", "multimodal")
    [emulated, *_] = plan_slots(counts, is_emulated=True)
    assert emulated.stage == "encoder=1,text.multimodal=1,text.text=2,preprocess=1"
    assert emulated.instances == ("encoder-0", "text-0", "text-1", "text-2", "preprocess-0")


@pytest.mark.parametrize("count", [0, -1, MAX_PER_STAGE + 1])
def test_a_count_out_of_bounds_is_named(count: int) -> None:
    with pytest.raises(BadRequest, match="--decode"):
        plan_slots(Counts(engines={**ONE_OF_EACH, "decode": count}))


def test_children_get_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        model="m", nats_url="nats://t@h:1", max_images=3, log_json=True, heartbeat_interval_s=0.25, port=9, name="x"
    )
    env = child_env(settings, {"PATH": "/bin", "TRIPTYCH_PORT": "9", "TRIPTYCH_MAX_IMAGES": "7"})
    assert env["PATH"] == "/bin"
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    expected = settings.model_copy(update={"port": 8000, "name": ""})
    assert load_settings() == expected
    assert "port" not in load_settings().model_fields_set, "a stage takes a free port unless it is told one"


def test_the_command_line_of_a_stage() -> None:
    slot = PlannedSlot("router-0", "router", ("router-0",))
    spec = serve_spec(slot, Settings(model="m"), 0, InstanceId("router-0-abc"), Path("/t"))
    expected = ("serve", "router", "--name", "router-0", "--instance-id", "router-0-abc", "--port", "0")
    assert spec.command == (sys.executable, "-m", "triptych.services.cli", *expected)
    assert spec.env["TMPDIR"] == "/t"
    assert "--port" not in serve_spec(slot, Settings(), None, InstanceId("x"), Path("/t")).command
