"""`triptych profile` on a machine whose costs are known: an engine that needs no time moves a clock instead.

What is measured, fitted, saved and derived must come to the truth that the engine was given.
"""

from __future__ import annotations

import io
import json
import random
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from triptych.services.profiler import command, run
from triptych.services.profiler.command import TYPICAL, ProfileOptions, run_profile, this_machine
from triptych.services.profiler.run import Tools, measure_profile
from triptych.services.profiler.summary import MAX_MEDIAN_ERROR, MAX_P95_ERROR, is_good, warnings
from triptych.shared.checkpoint import Checkpoint, ImageOptions
from triptych.shared.cost_model.api import CostModel, DecodeBatch, PrefillChunk
from triptych.shared.cost_model.derived import derive, isolated_slo
from triptych.shared.cost_model.forms import MemoryCosts, PassCosts, PreprocessCosts
from triptych.shared.cost_model.images import NativeResolution
from triptych.shared.cost_model.profile import Machine, Profile, read_profile
from triptych.shared.cost_model.unknowns import LinkCosts, Unknowns
from triptych.shared.engine.api import Chunk, Sequence
from triptych.shared.engine.paged_kv import BlockPool
from triptych.shared.errors import BadRequest
from triptych.shared.image_info import ImageInfo
from triptych.shared.instance_info import ModelCard
from triptych.shared.settings import Settings

IMAGES = ImageOptions(14, 2, 2, 56 * 56, 448 * 448, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
MACHINE = Machine("cpu", "Some CPU", num_cores=8, num_threads=2, dtype="float32")
BLOCK_SHAPE, BLOCK_SIZE, NUM_BLOCKS, EMBEDDING_SIZE = (2, 1, 2, 1, 16, 8), 16, 2000, 32
BLOCK_BYTES = 4 * 2 * 2 * 16 * 8
TRUTH = CostModel(
    name="truth",
    source="measured",
    architecture="DecOnly",
    tp=1,
    images=NativeResolution(IMAGES),
    preprocess=PreprocessCosts(0.001, 6e-8),
    encode=PassCosts(0.004, 8e-5, 60.0, 0.001, 2e-8),
    prefill=PassCosts(0.005, 5e-4, 24.0, 0.001, 4e-8, 2e-6),
    decode=PassCosts(0.006, 7e-4, 8.0, 0.0, 0.0, 1e-6),
    memory=MemoryCosts(7, BLOCK_BYTES // BLOCK_SIZE, 0, 4 * EMBEDDING_SIZE, BLOCK_BYTES * NUM_BLOCKS),
    unknowns=Unknowns(local=LinkCosts(0.0002, 1e8)),
)


class CostedEngine:
    """Implements what the profiler uses of Engine, in the time that TRUTH says, give or take `noise`."""

    def __init__(self, noise: float = 0.0) -> None:
        self.now_s = 0.0
        self.model_card = ModelCard("a-model", "r1", 8192)
        self.block_pool = BlockPool(NUM_BLOCKS)
        self.block_size = BLOCK_SIZE
        self._noise = noise
        self._rng = random.Random(3)

    def clock(self) -> float:
        return self.now_s

    def _spend(self, seconds: float) -> None:
        self.now_s += seconds * (1 + self._rng.uniform(-self._noise, self._noise))

    def preprocess(self, encoded: bytes) -> None:
        self._spend(TRUTH.preprocess_s(*Image.open(io.BytesIO(encoded)).size))

    def encode(self, images: Seq[ImageInfo], pixels: Seq[torch.Tensor]) -> list[torch.Tensor]:
        assert [tuple(picture.shape) for picture in pixels] == [(image.height, image.width, 3) for image in images]
        self._spend(TRUTH.encode_s([TRUTH.image(image.width, image.height) for image in images]))
        return [torch.zeros(image.num_tokens, EMBEDDING_SIZE) for image in images]

    def prepare(self, sequence: Sequence) -> None:
        assert sequence.num_computed_tokens == 0

    def run(self, chunks: Seq[Chunk]) -> list[int | None]:
        assert self.block_pool.num_used == sum(len(chunk.sequence.block_table) for chunk in chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            assert len(sequence.token_ids) == sequence.num_computed_tokens + chunk.num_tokens
            assert len(sequence.block_table) * BLOCK_SIZE >= len(sequence.token_ids)
        if all(chunk.num_tokens == 1 for chunk in chunks):
            self._spend(TRUTH.decode_s(DecodeBatch(len(chunks), sum(c.sequence.num_computed_tokens for c in chunks))))
        else:
            self._spend(TRUTH.prefill_s([PrefillChunk(c.num_tokens, c.sequence.num_computed_tokens) for c in chunks]))
        return [0] * len(chunks)

    def export_blocks(self, block_ids: Seq[int]) -> torch.Tensor:
        self._spend(TRUTH.transfer_s(BLOCK_BYTES * len(block_ids), "local"))
        return torch.zeros(len(block_ids))

    def import_blocks(self, blocks: torch.Tensor, block_ids: Seq[int]) -> None:
        assert len(blocks) == len(block_ids)
        assert self.block_pool.num_used == 2 * len(block_ids)

    def exported_shape(self, num_blocks: int) -> tuple[tuple[int, ...], torch.dtype]:
        return (BLOCK_SHAPE[0], num_blocks, *BLOCK_SHAPE[2:]), torch.float32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("a-model")
    (folder / "model.safetensors").write_bytes(b"weights")
    return Checkpoint(folder, "a-model", "r1", {}, IMAGES, 8192, 99, (), random_weights=True)


def measure(engine: CostedEngine, checkpoint: Checkpoint) -> Profile:
    tools = Tools(engine.preprocess, lambda stage, num_left: None, engine.clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "open_engine", lambda settings, num_threads: engine)
        profile = measure_profile(Settings(), checkpoint, MACHINE, is_quick=True, tools=tools)
    assert engine.block_pool.num_free == NUM_BLOCKS
    return profile


@pytest.fixture(scope="module")
def quick(checkpoint: Checkpoint) -> Profile:
    """Measured without noise."""
    return measure(CostedEngine(), checkpoint)


def test_the_truth_is_found(quick: Profile) -> None:
    assert (quick.machine, quick.model.revision, quick.memory) == (MACHINE, "r1", TRUTH.memory)
    for _, stage in quick.stages():
        assert stage.error.num_points >= 2
        assert stage.error.p95 < 0.03
    found = quick.cost_model()
    assert found.transfer_s(10**6, "local") == pytest.approx(TRUTH.transfer_s(10**6, "local"), rel=0.03)
    image = TRUTH.image(300, 250)
    assert found.preprocess_s(700, 600) == pytest.approx(TRUTH.preprocess_s(700, 600), rel=0.03)
    assert found.encode_s([image] * 3) == pytest.approx(TRUTH.encode_s([image] * 3), rel=0.03)
    assert found.prefill_s([PrefillChunk(300, 100)]) == pytest.approx(TRUTH.prefill_s([PrefillChunk(300, 100)]), rel=0.03)
    assert found.decode_s(DecodeBatch(20, 5000)) == pytest.approx(TRUTH.decode_s(DecodeBatch(20, 5000)), rel=0.03)


def test_what_is_derived_is_that_of_the_truth(quick: Profile) -> None:
    found = quick.cost_model()
    slo = isolated_slo(TRUTH, TYPICAL, 5.0)
    got, want = derive(found, TYPICAL, slo), derive(TRUTH, TYPICAL, slo)
    assert got.max_decode_batch == pytest.approx(want.max_decode_batch, rel=0.1)
    assert got.max_prefill_tokens == pytest.approx(want.max_prefill_tokens, rel=0.1)
    assert got.image.tokens_per_s == pytest.approx(want.image.tokens_per_s, rel=0.1)
    assert got.text.tokens_per_s == pytest.approx(want.text.tokens_per_s, rel=0.1)
    assert want.max_decode_batch > 1
    assert want.image.batch > 1


def test_noise_that_medians_can_bear_keeps_the_promise(checkpoint: Checkpoint) -> None:
    profile = measure(CostedEngine(noise=0.2), checkpoint)
    assert all(is_good(stage) for _, stage in profile.stages())
    assert warnings(profile) == []


def test_noise_that_they_can_not_bear_is_warned_of(checkpoint: Checkpoint) -> None:
    profile = measure(CostedEngine(noise=0.95), checkpoint)
    assert any(stage.error.p95 > MAX_P95_ERROR or stage.error.median > MAX_MEDIAN_ERROR for _, stage in profile.stages())
    assert "was the machine busy" in warnings(profile)[0]


def options(out: Path, **changes: Any) -> ProfileOptions:
    return replace(ProfileOptions(is_quick=True, out=out, load=None, slo_factor=5.0, is_json=False), **changes)


@pytest.fixture(scope="module")
def saved(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of this machine, made by the command."""
    engine, out = CostedEngine(), tmp_path_factory.mktemp("profiles") / "a.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "open_engine", lambda settings, num_threads: engine)
        patch.setattr(run, "Tools", lambda preprocess, tick: Tools(preprocess, tick, engine.clock))
        run_profile(Settings(), checkpoint, engine.preprocess, options(out))
    return out


def test_the_command_tells_saves_and_plots(saved: Path, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    profile = read_profile(saved)
    assert profile.machine == this_machine(Settings())
    drawn = ET.fromstring(saved.with_suffix(".svg").read_text())
    styles = Counter(element.get("class") for element in drawn.iter() if element.tag.endswith("polyline"))
    held_out = [point.is_held_out for _, stage in profile.stages() for point in stage.points]
    assert (styles["line dots held-out"], styles["line dots fitted"]) == (sum(held_out), len(held_out) - sum(held_out))
    run_profile(Settings(), checkpoint, lambda encoded: None, options(saved, load=saved))
    shown = capsys.readouterr()
    assert "capacity of an image instance" in shown.out
    assert "KV to another instance here: 220 µs and 0.1 GB/s" in shown.out
    assert all(f"\n{name}" in shown.out for name, _ in profile.stages())
    assert shown.err == ""


def test_the_command_tells_programs(saved: Path, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    run_profile(Settings(), checkpoint, lambda encoded: None, options(saved, load=saved, is_json=True))
    told = json.loads(capsys.readouterr().out)
    assert told["stages"]["prefill"]["costs"]["fixed_s"] > 0
    assert told["stages"]["decode"]["held_out_error"]["p95"] < 0.03
    assert told["derived"]["image"]["tokens_per_s"] > 0
    assert told["profile"] == str(saved)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("no/a.json", "cannot write a.json: No such file"),
        ("", "cannot write .*: Is a directory"),
        ("a.svg", "name it other than .svg"),
    ],
)
def test_where_it_cannot_go_is_told_before_it_is_measured(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, said: str
) -> None:
    monkeypatch.setattr(run, "open_engine", lambda settings, num_threads: pytest.fail("it was measured"))
    with pytest.raises(BadRequest, match=said):
        run_profile(Settings(), checkpoint, lambda encoded: None, options(tmp_path / out))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "stage"),
    [({"max_prefill_tokens": 16, "max_model_len": 32}, "prefill"), ({"max_image_pixels": 5000}, "preprocess")],
)
def test_too_few_passes_are_told_before_they_are_measured(
    checkpoint: Checkpoint, given: dict[str, Any], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CostedEngine()
    engine.model_card = ModelCard("a-model", "r1", given.get("max_model_len", 8192))
    monkeypatch.setattr(run, "open_engine", lambda settings, num_threads: engine)
    tools = Tools(engine.preprocess, lambda stage, num_left: None, engine.clock)
    with pytest.raises(BadRequest, match=f"passes of {stage} are small enough"):
        measure_profile(Settings(**given), checkpoint, MACHINE, is_quick=True, tools=tools)
    assert engine.now_s == 0.0


def test_a_profile_of_something_else_is_refused(saved: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    use = options(saved, load=saved)
    with pytest.raises(BadRequest, match="of another model: a-model"):
        run_profile(Settings(), replace(checkpoint, revision="r2"), lambda encoded: None, use)
    with pytest.raises(BadRequest, match="of another machine"):
        run_profile(Settings(dtype="bfloat16"), checkpoint, lambda encoded: None, use)
    monkeypatch.setattr(command, "cpu_name", lambda: "Other CPU")
    with pytest.raises(BadRequest, match="this is Other CPU"):
        run_profile(Settings(), checkpoint, lambda encoded: None, use)
