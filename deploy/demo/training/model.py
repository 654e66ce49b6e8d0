"""The model that is trained: a Qwen2.5-VL with few and narrow layers, its first weights, and how it is saved."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import nn

from training.pictures import processor_config
from training.recipe import ModelShape
from training.tokenizer import END_TOKEN, save_tokenizer
from triptych.loadgen.checkpoint import SPECIAL_TOKENS, CheckpointShape, model_config

_WINDOW_SIZE = 112  # pixels, as in Qwen2.5-VL
_RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "attn.proj.weight")


def make_model(shape: ModelShape, tokenizer: Tokenizer, seed: int) -> Any:
    """A Qwen2_5_VLForConditionalGeneration in float32, on the CPU. The scales of the first weights are chosen."""
    untyped: Any = transformers  # most of it has no annotations
    model = untyped.Qwen2_5_VLForConditionalGeneration(untyped.Qwen2_5_VLConfig(**_config(shape, tokenizer))).float()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            nn.init.normal_(parameter, std=0.05, generator=generator)
        elif parameter.ndim >= 2:
            gain = (0.4 if "patch_embed" in name else 0.6) * (0.5 if name.endswith(_RESIDUAL_OUTPUTS) else 1)
            nn.init.normal_(parameter, std=gain / math.sqrt(parameter[0].numel()), generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def save_checkpoint(model: Any, shape: ModelShape, tokenizer: Tokenizer, folder: Path) -> None:
    """The Hugging Face layout, weights in bfloat16."""
    model = copy.deepcopy(model).to("cpu", torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.token_to_id(END_TOKEN)
    model.generation_config.pad_token_id = tokenizer.token_to_id(SPECIAL_TOKENS[0])
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes 0600
    save_tokenizer(tokenizer, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_config(shape), indent=2, sort_keys=True) + "\n")


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _config(shape: ModelShape, tokenizer: Tokenizer) -> dict[str, Any]:
    sizes = CheckpointShape(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        max_position_embeddings=8192,
        vision_hidden_size=shape.vision_hidden_size,
        vision_intermediate_size=shape.vision_intermediate_size,
        vision_depth=shape.vision_depth,
        vision_num_heads=shape.vision_num_heads,
        vision_window_size=_WINDOW_SIZE,
        vision_full_attention=tuple(range(1, shape.vision_depth, 2)),
        rope_theta=shape.rope_theta,
    )
    return model_config(sizes, tokenizer.get_vocab())
