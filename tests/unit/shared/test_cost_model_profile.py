"""Profiles as files: what is written is what is read, and what does not fit is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from triptych.shared.checkpoint import ImageOptions
from triptych.shared.cost_model.api import DecodeBatch, PrefillChunk
from triptych.shared.cost_model.fit import fit_stage
from triptych.shared.cost_model.forms import MemoryCosts, PassCosts, PassWork
from triptych.shared.cost_model.profile import (
    VERSION,
    Machine,
    Profile,
    ProfiledModel,
    StageProfile,
    TimedPass,
    read_profile,
    require_writable,
    write_profile,
)
from triptych.shared.cost_model.unknowns import LinkCosts, Unknowns
from triptych.shared.errors import BadRequest

MACHINE = Machine("cpu", "Some CPU", num_cores=8, num_threads=2, dtype="float32")
IMAGES = ImageOptions(14, 2, 2, 56 * 56, 448 * 448, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def stage(costs: PassCosts) -> StageProfile:
    works = [PassWork(n, 1, n * n / 2, n) for n in (1, 2, 4, 8, 16, 32, 64, 128)]
    return fit_stage([TimedPass(work, costs.pass_s(work)) for work in works])


@pytest.fixture(scope="module")
def profile() -> Profile:
    step = stage(PassCosts(0.010, 0.001))
    return Profile(
        version=VERSION,
        measured_at="2026-01-02T03:04:05Z",
        machine=MACHINE,
        model=ProfiledModel("a-model", "abcdef0123456789", IMAGES),
        memory=MemoryCosts(10**8, 1000, 0, 512, 10**7),
        preprocess=stage(PassCosts(0.002, 1e-4)),
        encode=step,
        prefill=step,
        decode=step,
    )


def test_what_is_written_is_what_is_read(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert path.read_text().count("\n") > 100  # for people, and for diff


def test_a_profile_is_a_cost_model(profile: Profile) -> None:
    model = profile.cost_model(Unknowns(role_switch_s=9.0))
    assert (model.source, model.architecture, model.tp) == ("measured", "DecOnly", 1)
    assert model.prefill_s([PrefillChunk(50)]) == pytest.approx(0.060, rel=0.02)
    assert model.decode_s(DecodeBatch(10, 100)) == pytest.approx(0.020, rel=0.02)
    assert model.preprocess_s(100, 100) == pytest.approx(1.002, rel=0.02)
    assert model.image(448, 448).num_tokens == 256
    assert model.embedding_bytes(model.image(448, 448)) == 256 * 512
    assert (model.kv_bytes(3), model.role_switch_s) == (3000, 9.0)


def test_a_link_that_was_not_measured_is_chosen(profile: Profile, tmp_path: Path) -> None:
    """As in profiles of before it was; one of another kind is none."""
    path = tmp_path / "a.json"
    write_profile(replace(profile, link=LinkCosts(0.001, 5e8)), path)
    assert read_profile(path).cost_model().transfer_s(500, "local") == pytest.approx(0.001001)
    written = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in written.items() if name != "link"}))
    assert read_profile(path).link == Unknowns().local
    path.write_text(json.dumps(written | {"link": {"latency_s": 0.0, "bytes_per_s": 0.0}}))
    with pytest.raises(BadRequest, match="is not a profile"):
        read_profile(path)


def test_the_same_machine_and_model_match(profile: Profile) -> None:
    profile.require_match(replace(MACHINE), "abcdef0123456789")


@pytest.mark.parametrize(
    "change",
    [{"name": "Other CPU"}, {"num_cores": 4}, {"num_threads": 1}, {"dtype": "bfloat16"}, {"device": "cuda"}],
    ids=lambda change: next(iter(change)),
)
def test_another_machine_is_refused(profile: Profile, change: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=r"is of another machine .*Some CPU, 8 cores, 2 threads, float32") as caught:
        profile.require_match(replace(MACHINE, **change), profile.model.revision)  # type: ignore[arg-type]
    assert "\n" not in caught.value.message


def test_another_model_is_refused(profile: Profile) -> None:
    with pytest.raises(BadRequest, match="of another model: a-model, revision abcdef012345, not 999") as caught:
        profile.require_match(MACHINE, "999")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "a.json is not a profile"),
        (b"[1, 2]", "a.json is not a profile"),
        (b'{"version": "new"}', "a.json is not a profile"),
        (b'{"version": 1}', "a.json is not a profile.*measured_at"),
        (b'{"version": 99, "else": 1}', "a.json is a profile of version 99, this is version 1"),
        (b'\xff\xfe{"version": 1}', "a.json is not a profile"),
    ],
    ids=["empty", "list", "text", "incomplete", "version", "bytes"],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(BadRequest, match=said) as caught:
        read_profile(path)
    assert "\n" not in caught.value.message


def test_a_wrong_type_in_the_middle_is_named(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_profile(profile, path)
    content = json.loads(path.read_text())
    content["decode"]["costs"]["token_s"] = "fast"
    path.write_text(json.dumps(content))
    with pytest.raises(BadRequest, match=r"decode\.costs\.token_s"):
        read_profile(path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("decode.costs.token_s", -1.0),
        ("prefill.costs.knee_tokens", -0.5),
        ("encode.points.0.seconds", 0.0),
        ("encode.points.0.work.num_pairs", -1),
        ("encode.points", []),
        ("preprocess.error.p95", -0.1),
        ("memory.kv_bytes_per_token", 0),
        ("memory.kv_capacity_bytes", -1),
        ("model.images.patch_size", 0),
        ("model.images.max_pixels", -5),
    ],
)
def test_a_value_that_cannot_be_is_refused(profile: Profile, tmp_path: Path, where: str, value: object) -> None:
    """Else it would be an error of arithmetic much later, or a plan that is nonsense."""
    refused = _edited(profile, tmp_path / "a.json", where, value)
    assert where.partition(".")[0] in refused


def test_costs_that_are_none_are_refused(profile: Profile, tmp_path: Path) -> None:
    for name in ("preprocess", "encode", "prefill", "decode"):
        costs = {"fixed_s": 0, "token_s": 0}
        assert f"passes of {name} cost nothing" in _edited(profile, tmp_path / "a.json", f"{name}.costs", costs)


def _edited(profile: Profile, path: Path, where: str, value: object) -> str:
    """What is said of a profile with this value in place of its own."""
    write_profile(profile, path)
    content = json.loads(path.read_text())
    *parents, name = where.split(".")
    place = content
    for parent in parents:
        place = place[int(parent) if parent.isdecimal() else parent]
    place[name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(BadRequest) as caught:
        read_profile(path)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("depth", [10_000, 200_000])
def test_what_is_nested_deeply_is_refused(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"version": 1, "else": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(BadRequest, match="is not a profile"):
        read_profile(path)


def test_whether_it_can_be_written_is_known_before(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("an older one")
    require_writable(there)
    require_writable(tmp_path / "new.json")
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]
    assert there.read_text() == "an older one"
    for path in (tmp_path, tmp_path / "no" / "a.json", there / "a.json", tmp_path / ("x" * 300)):
        with pytest.raises(BadRequest, match="cannot write"):
            require_writable(path)


def test_no_file_and_no_folder_are_told(profile: Profile, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"cannot read the profile: a\.json: No such file"):
        read_profile(tmp_path / "a.json")
    with pytest.raises(BadRequest, match=r"cannot write the profile: a\.json: No such file"):
        write_profile(profile, tmp_path / "no" / "a.json")
