"""The torch engine on a CUDA device: parity with transformers there, bfloat16, and how fast it goes (printed as JSON).

Needs little beside torch and transformers; skipped without a device.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.engine_cases import (
    MAX_TOKENS,
    Case,
    Model,
    finish,
    new_sequence,
    output,
    picture_info,
    random_case,
    release,
    run_random_chunks,
    step,
)
from triptych.loadgen.checkpoint import make_checkpoint
from triptych.shared.checkpoint import Checkpoint, open_checkpoint
from triptych.shared.engine.api import Chunk, Sequence
from triptych.shared.engine.torch_engine import TorchEngine, load_engine
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import RequestId
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.settings import Settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WAIT_S = 60.0
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(str(tiny_checkpoint))


@pytest.fixture(scope="module")
def cases(checkpoint: Checkpoint) -> list[Case]:
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Model(checkpoint.path, device="cuda")
    return [random_case(seed, checkpoint, model) for seed in range(40)]


@pytest.mark.parametrize("block_size", [5, 16])
def test_float32_equals_generate(checkpoint: Checkpoint, cases: list[Case], block_size: int) -> None:
    engine = load_engine(checkpoint, Settings(device="cuda", block_size=block_size, kv_cache_bytes=64 << 20))
    sequences = [new_sequence(engine, checkpoint, case, GREEDY) for case in cases]
    run_random_chunks(engine, sequences, random.Random(block_size))
    for case, sequence in zip(cases, sequences, strict=True):
        assert case.answer.difference(output(sequence)) is None
    release(engine, sequences)


def test_blocks_pass_through_host_memory_to_a_second_engine(checkpoint: Checkpoint, cases: list[Case]) -> None:
    first, second = (load_engine(checkpoint, Settings(device="cuda", kv_cache_bytes=64 << 20)) for _ in range(2))
    second.block_pool.allocate(3)  # other block ids than in the first
    for case in cases[:8]:
        sequence = new_sequence(first, checkpoint, case, GREEDY)
        token = first.run([Chunk(sequence, len(case.prompt))])[0]
        assert token is not None
        shape, dtype = first.exported_shape(len(sequence.block_table))
        blocks = first.export_blocks(sequence.block_table, torch.empty(shape, dtype=dtype))
        table = second.block_pool.allocate(len(sequence.block_table))
        second.import_blocks(blocks, table)
        tokens = [*[0] * len(case.prompt), token]
        arrived = Sequence(RequestId("r"), tokens, len(case.prompt), GREEDY, [], table, len(case.prompt))
        arrived.position_delta = sequence.position_delta
        finish(second, [arrived])
        assert case.answer.difference(output(arrived)) is None
        release(first, [sequence])


def test_images_of_many_requests_are_encoded_as_each_alone(checkpoint: Checkpoint, cases: list[Case]) -> None:
    engine = load_engine(checkpoint, Settings(device="cuda", kv_cache_bytes=64 << 20))
    described = [picture_info(picture, checkpoint) for case in cases for picture in case.pictures]
    alone = [engine.encode([info], [pixels])[0] for info, pixels in described]
    rng = random.Random(0)
    for count in (2, 3, 8, 16, len(described)):
        batch = rng.sample(range(len(described)), count)
        together = engine.encode([described[i][0] for i in batch], [described[i][1] for i in batch])
        for i, embeddings in zip(batch, together, strict=True):
            torch.testing.assert_close(embeddings, alone[i], rtol=1e-4, atol=1e-4)


def test_hand_off_beside_running_batches(checkpoint: Checkpoint, cases: list[Case]) -> None:
    """As instances do it: blocks are exported and imported by other threads while both engines run other requests."""
    first, second = (load_engine(checkpoint, Settings(device="cuda", kv_cache_bytes=64 << 20)) for _ in range(2))
    second.block_pool.allocate(3)  # other block ids than in the first
    arrived: queue.Queue[tuple[int, Sequence]] = queue.Queue()

    def hand_off(index: int, sequence: Sequence) -> None:
        shape, dtype = first.exported_shape(len(sequence.block_table))
        blocks = first.export_blocks(sequence.block_table, torch.empty(shape, dtype=dtype))
        second.import_blocks(blocks, tables[index])
        tokens = [*[0] * sequence.num_prompt_tokens, sequence.token_ids[-1]]
        copy = Sequence(RequestId("r"), tokens, sequence.num_prompt_tokens, GREEDY, [], tables[index], len(tokens) - 1)
        copy.position_delta = sequence.position_delta
        arrived.put((index, copy))

    def decode() -> dict[int, Sequence]:
        done: dict[int, Sequence] = {}
        running: dict[int, Sequence] = {}
        while len(done) < len(cases):
            with contextlib.suppress(queue.Empty):
                while len(running) + len(done) < len(cases):
                    running.update([arrived.get(block=not running, timeout=WAIT_S)])
            step(second, list(running.values()), {})
            done |= {i: s for i, s in running.items() if s.num_output_tokens == s.sampling.max_tokens}
            running = {i: s for i, s in running.items() if i not in done}
        return done

    for _ in range(5):
        sequences = [new_sequence(first, checkpoint, case, GREEDY) for case in cases]
        tables = [second.block_pool.allocate(len(sequence.block_table)) for sequence in sequences]
        with ThreadPoolExecutor(5) as threads:
            decoding = threads.submit(decode)
            handed = []
            for index in range(0, len(sequences), 4):
                group = sequences[index : index + 4]
                while any(sequence.num_output_tokens == 0 for sequence in group):
                    step(first, [s for s in group if s.num_output_tokens == 0], {0: 13, 1: 50})
                handed += [threads.submit(hand_off, index + i, sequence) for i, sequence in enumerate(group)]
            for future in handed:
                future.result(WAIT_S)
            done = decoding.result(WAIT_S)
        wrong = [i for i, case in enumerate(cases) if case.answer.difference(output(done[i])) is not None]
        assert not wrong, f"{wrong} differ, first tokens {[output(done[i])[:2] for i in wrong]}"
        release(first, sequences)
        for table in tables:
            second.block_pool.free(table)


def test_bfloat16_runs(checkpoint: Checkpoint, cases: list[Case]) -> None:
    settings = Settings(device="cuda", dtype="bfloat16", kv_cache_bytes=64 << 20)
    engine = load_engine(checkpoint, settings)
    sequences = [new_sequence(engine, checkpoint, case, GREEDY) for case in cases]
    run_random_chunks(engine, sequences, random.Random(0))
    vocab_size = checkpoint.config["text_config"]["vocab_size"]
    assert all(0 <= token < vocab_size for s in sequences for token in output(s))
    release(engine, sequences)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call, after one that warms up."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // 2]


def prefilled(engine: TorchEngine, num_prompt: int, num_output: int) -> Sequence:
    sequence = Sequence(RequestId("r"), [7] * num_prompt, num_prompt, SamplingParams(max_tokens=num_output))
    engine.prepare(sequence)
    sequence.block_table = engine.block_pool.allocate(-(-(num_prompt + num_output) // engine.block_size))
    return sequence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speed_is_told(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    """Figures for the `bench` checkpoint; no bound on them, as devices differ."""
    folder = tmp_path_factory.getbasetemp() / "bench"
    if not folder.exists():
        make_checkpoint("bench", folder)
    settings = Settings.model_validate({"device": "cuda", "dtype": dtype, "kv_cache_bytes": 4 << 30})
    engine = load_engine(open_checkpoint(str(folder)), settings)
    figures: dict[str, float] = {}
    for batch in (1, 8, 32, 128):
        sequences = [prefilled(engine, 512, 64) for _ in range(batch)]
        for sequence in sequences:
            sequence.token_ids.append(engine.run([Chunk(sequence, 512)])[0] or 0)

        def decode(running: list[Sequence] = sequences) -> None:
            for sequence, token in zip(running, engine.run([Chunk(s, 1) for s in running]), strict=True):
                assert token is not None
                sequence.token_ids.append(token)

        figures[f"decode_tokens_per_s_batch_{batch}"] = round(batch / seconds(decode, 20), 1)
        release(engine, sequences)

    def prefill() -> None:
        sequence = prefilled(engine, 2048, 0)
        engine.run([Chunk(sequence, 2048)])
        release(engine, [sequence])

    figures["prefill_tokens_per_s"] = round(2048 / seconds(prefill, 5), 1)
    image = ImageInfo(b"", 448, 448, (1, 32, 32), 256)
    pixels = torch.zeros(448, 448, 3, dtype=torch.uint8)
    figures["encode_images_per_s_batch_8"] = round(8 / seconds(lambda: engine.encode([image] * 8, [pixels] * 8), 5), 1)
    with capsys.disabled():
        print(json.dumps({"device": torch.cuda.get_device_name(), "dtype": dtype, **figures}))
    assert all(value > 0 for value in figures.values())
