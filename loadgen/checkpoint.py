"""Seeded random Qwen2.5-VL-architecture checkpoints with everything that goes with one: tokenizer, processor, template.

`tiny` is for tests, the others for measurements; `smollm2-135m` has that model's text dimensions. They answer nonsense, but
nonsense that depends on every token and picture, with well separated logits, so that equality of tokens is a sharp test. They
load in plain transformers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from blake3 import blake3

if TYPE_CHECKING:
    import torch

Kind = Literal["tiny", "bench", "smollm2-135m"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Qwen2.5's special tokens, in its order
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or part['type'] == 'image_url' or 'image' in part or 'image_url' in part -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 448 * 448,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],  # CLIP's, as Qwen2-VL's processor has them
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """Sizes of a checkpoint: text first, vision_* after. Heads are 32 or 64 wide: vLLM's kernels have no narrower ones."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_position_embeddings: int
    vision_hidden_size: int
    vision_intermediate_size: int
    vision_depth: int
    vision_num_heads: int
    vision_window_size: int
    vision_full_attention: tuple[int, ...]
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0


SHAPES: dict[Kind, CheckpointShape] = {
    "tiny": CheckpointShape(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        max_position_embeddings=8192,
        vision_hidden_size=64,
        vision_intermediate_size=128,
        vision_depth=3,
        vision_num_heads=2,
        vision_window_size=56,
        vision_full_attention=(1,),
    ),
    "bench": CheckpointShape(
        vocab_size=8192,
        hidden_size=640,
        intermediate_size=1792,
        num_layers=10,
        num_heads=10,
        num_kv_heads=2,
        max_position_embeddings=32768,
        vision_hidden_size=512,
        vision_intermediate_size=1408,
        vision_depth=8,
        vision_num_heads=8,
        vision_window_size=112,
        vision_full_attention=(3, 7),
    ),
    "smollm2-135m": CheckpointShape(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        max_position_embeddings=8192,
        vision_hidden_size=64,
        vision_intermediate_size=128,
        vision_depth=3,
        vision_num_heads=2,
        vision_window_size=56,
        vision_full_attention=(1,),
        tie_word_embeddings=True,
    ),
}


def make_checkpoint(kind: Kind, out_dir: Path, seed: int = 0) -> Path:
    """Write a checkpoint to out_dir (made if absent, files overwritten). The same seed writes the same weights."""
    # Deferred: the rest of loadgen must import without torch.
    import torch
    import transformers
    from tokenizers import Tokenizer

    untyped: Any = transformers  # most of it has no annotations
    out_dir.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[kind]
    vocab, merges = _vocabulary(shape.vocab_size - len(SPECIAL_TOKENS))
    ids = {token: len(vocab) + i for i, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer.from_str(json.dumps(_tokenizer(vocab, merges, ids)))
    tokenizer.save(str(out_dir / "tokenizer.json"))
    config = model_config(shape, ids)
    with torch.device("meta"):
        model = untyped.Qwen2_5_VLForConditionalGeneration(untyped.Qwen2_5_VLConfig(**config)).to(torch.float32)
    model.to_empty(device="cpu")
    model.tie_weights()  # the two were separated
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_initial(name, tuple(parameter.shape), seed))
    untyped.utils.logging.disable_progress_bar()
    model.save_pretrained(out_dir)
    (out_dir / "model.safetensors").chmod(0o644)  # safetensors writes 0600; a container's user is another one
    _write_json(out_dir / "config.json", {**config, "triptych_random_weights": True})
    _write_json(out_dir / "preprocessor_config.json", PROCESSOR)
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(shape))
    generation = {"bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"]}
    generation["eos_token_id"] = ids["<|im_end|>"]
    _write_json(out_dir / "generation_config.json", generation)
    (out_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return out_dir


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level BPE vocabulary: the 256 bytes, then syllables, syllables after a space, and words of two syllables, so
    that every id shows as something and no training corpus is needed."""
    # Deferred like torch: only making a checkpoint needs it.
    from tokenizers.pre_tokenizers import ByteLevel

    space = "\u0120"  # how byte-level BPE writes a space
    tokens = sorted(ByteLevel.alphabet())
    syllables = [a + b for a, b in product("bcdfghklmnprstvwxyz", "aeiou")] + ["th", "in", "er", "an", "on", "st", "ch"]
    words = sorted(product(syllables, syllables), key=lambda pair: blake3("".join(pair).encode()).digest())
    longer = ((space + a + b, c) for (a, b), c in product(words, syllables))  # where words of two are too few
    candidates = [(s[0], s[1]) for s in syllables] + [(space, s) for s in syllables] + [(space + a, b) for a, b in words]
    candidates += islice(longer, max(0, 2 * (size - len(candidates))))  # twice: some come again
    distinct = {a + b: (a, b) for a, b in reversed(candidates)}  # two ways to one word: the earlier one stays
    merges = [pair for pair in candidates if distinct[pair[0] + pair[1]] == pair][: size - len(tokens)]
    tokens += [a + b for a, b in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != size:
        raise ValueError(f"the syllables make {len(vocab)} distinct tokens, {size} are wanted")
    return vocab, merges


def _tokenizer(vocab: dict[str, int], merges: list[tuple[str, str]], special_ids: dict[str, int]) -> dict[str, Any]:
    """tokenizer.json. Digits stand alone, as in Qwen."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in special_ids.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": False, "ignore_merges": False},
    }


def _tokenizer_config(shape: CheckpointShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
    }


def model_config(shape: CheckpointShape, ids: dict[str, int]) -> dict[str, Any]:
    """config.json. ids: of all SPECIAL_TOKENS. There is no `rope_scaling` beside `rope_parameters`: transformers 5 would forget
    theta."""
    quarter = shape.hidden_size // shape.num_heads // 8
    text = {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_position_embeddings,
        "layer_types": ["full_attention"] * shape.num_layers,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "bos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        # sections of the head's frequencies that turn with time, height and width; theta is low since heads are narrow
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "mrope_section": [4 * quarter - 2 * (3 * quarter // 2), 3 * quarter // 2, 3 * quarter // 2],
        },
    }
    vision = {
        "model_type": "qwen2_5_vl_vision",
        "depth": shape.vision_depth,
        "hidden_size": shape.vision_hidden_size,
        "intermediate_size": shape.vision_intermediate_size,
        "num_heads": shape.vision_num_heads,
        "out_hidden_size": shape.hidden_size,
        "window_size": shape.vision_window_size,
        "fullatt_block_indexes": list(shape.vision_full_attention),
        "patch_size": PROCESSOR["patch_size"],
        "temporal_patch_size": PROCESSOR["temporal_patch_size"],
        "spatial_merge_size": PROCESSOR["merge_size"],
        "in_channels": 3,
        "hidden_act": "silu",
        "tokens_per_second": 2,
    }
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "float32",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": shape.tie_word_embeddings,
        "text_config": text,
        "vision_config": vision,
    }


# Gains over 1/sqrt(fan_in), chosen by trial so that attention picks out tokens (scores with a deviation near 2), the residual
# stream is mostly context rather than the last token, and greedy output neither loops nor has near ties.
_GAINS = {"q_proj": 1.5, "k_proj": 1.5, "qkv": 1.3, "o_proj": 1.6, "v_proj": 1.2, "down_proj": 1.2, "lm_head": 3.0}
_EMBEDDING_STD = 0.6


def _initial(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Initial value of one parameter: depends on its name, shape and the seed only, not on the order of parameters."""
    import torch  # deferred: see make_checkpoint

    digest = blake3(f"{seed}/{name}".encode()).digest(length=7)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little")))
    layer, kind = name.split(".")[-2:]
    if kind == "bias":
        return noise * 0.1
    if len(shape) == 1:  # a norm's scale
        return 1.0 + noise * 0.1
    if layer == "embed_tokens":
        return noise * _EMBEDDING_STD
    return noise * (_GAINS.get(layer, 1.0) / math.sqrt(math.prod(shape[1:])))
