"""The fused text layers against transformers' modules, each over a paged cache of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from triptych.shared.engine import weights
from triptych.shared.engine.api import Chunk, Sequence
from triptych.shared.engine.attention import ATTENTION_NAME, paged_attention
from triptych.shared.engine.batch_plan import plan_batch
from triptych.shared.engine.fused_text import FusedText, can_fuse
from triptych.shared.engine.kv_cache import KvCache
from triptych.shared.engine.paged_group import PagedGroups
from triptych.shared.engine.paged_kv import BlockPool
from triptych.shared.messages import RequestId
from triptych.shared.sampling_params import SamplingParams

_untyped: Any = transformers
AXES = torch.tensor([0] * 2 + [1] * 3 + [2] * 3)
PASSES = [  # tokens of each of four sequences, and which of these come to their end
    ((5, 0, 300, 0), {2}),
    ((1, 1, 40, 700), {0, 3}),  # longer than a tile of the MLP
    ((1, 3, 0, 0), set[int]()),
    ((1, 1, 1, 1), {0, 1, 2, 3}),
]


def text_model(**changed: Any) -> Any:
    """Random weights, norms included."""
    torch.manual_seed(0)
    config = {
        "vocab_size": 64,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_parameters": rope("default"),
    }
    text_config = _untyped.Qwen2_5_VLConfig(text_config=config | changed).text_config
    _untyped.AttentionInterface.register(ATTENTION_NAME, paged_attention)
    text_config._attn_implementation = ATTENTION_NAME
    model = _untyped.Qwen2_5_VLTextModel(text_config).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    return model


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_theta": 100.0, "rope_type": kind, "mrope_section": [2, 3, 3], **more}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=256)  # it scales cosines and sines


def difference(model: Any) -> float:
    """Of hidden states that both make of the same batches, the largest one in relation to their size."""
    fused, dtype = FusedText(copy.deepcopy(model), AXES), model.norm.weight.dtype
    caches = [KvCache((3, 300, 2, model.config.num_key_value_heads, 4, 16), dtype, torch.device("cpu")) for _ in range(2)]
    paged = PagedGroups(caches[1], 6) if dtype == torch.float32 else None
    pool, largest = BlockPool(300), 0.0
    totals = [sum(column) for column in zip(*(sizes for sizes, _ in PASSES), strict=True)]
    sequences = [Sequence(RequestId("r"), [], n, SamplingParams(max_tokens=1)) for n in totals]
    for sequence, total in zip(sequences, totals, strict=True):
        sequence.block_table = pool.allocate(total // 4 + 1)
    for sizes, ending in PASSES:
        chunks = [Chunk(sequence, size) for sequence, size in zip(sequences, sizes, strict=True) if size]
        for i, sequence in enumerate(sequences):
            sequence.token_ids = [0] * (sequence.num_computed_tokens + sizes[i] + (i not in ending))
        theirs, ours = plan_batch(chunks, caches[0]), plan_batch(chunks, caches[1], paged)
        embeds, positions = torch.randn(sum(sizes), 96, dtype=dtype), torch.randint(0, 900, (3, sum(sizes)))
        with torch.inference_mode():
            inputs = {"inputs_embeds": embeds[None], "position_ids": positions[:, None], "use_cache": False}
            expected = model(**inputs, attention_mask={"full_attention": None}, plan=theirs).last_hidden_state[0]
            found = fused.forward(embeds.clone(), positions, ours)
        if theirs.last_rows is not None:
            expected = expected[theirs.last_rows]
        assert found.shape == expected.shape == (len(ending), 96)
        if ending:
            largest = max(largest, float((found - expected).abs().max() / expected.abs().max()))
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
    return largest


@pytest.mark.parametrize(
    "changed",
    [{}, {"rope_parameters": YARN}, {"num_key_value_heads": 6}, {"rms_norm_eps": 0.1}],
    ids=["default", "yarn", "as many key heads", "large epsilon"],
)
def test_fused_layers_equal_the_modules(changed: dict[str, Any]) -> None:
    assert difference(text_model(**changed)) < 1e-5


def test_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MIN_PACKED", 0)
    assert difference(text_model()) < 1e-5


def test_fused_layers_are_as_the_modules_in_bfloat16() -> None:
    assert difference(text_model().to(torch.bfloat16)) < 0.05


def test_the_modules_give_their_layers_up() -> None:
    """Their weights are not kept twice."""
    model = text_model()
    FusedText(model, AXES)
    assert len(model.layers) == 0


def test_layers_that_are_not_built_so_are_not_fused() -> None:
    assert can_fuse(text_model())
    assert not can_fuse(text_model(hidden_act="gelu"))
    assert not can_fuse(text_model(rope_parameters=rope("dynamic", factor=2.0)))
    other = text_model()
    other.layers[1] = torch.nn.Identity()
    assert not can_fuse(other)
