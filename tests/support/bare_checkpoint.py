"""A checkpoint folder with all that processes without an engine read, and weights that mean nothing. Made in a millisecond."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 7,
    "text_config": {"max_position_embeddings": 512, "eos_token_id": 2},
}
PROCESSOR: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 200704,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}


def write_weights(path: Path, values: list[bytes], header: bytes | None = None) -> None:
    """A safetensors file with one uint8 tensor per value; `header` replaces the right one."""
    offsets = [sum(len(value) for value in values[:index]) for index in range(len(values) + 1)]
    tensors = {
        f"w{index}": {"dtype": "U8", "shape": [len(value)], "data_offsets": offsets[index : index + 2]}
        for index, value in enumerate(values)
    }
    header = json.dumps(tensors | {"__metadata__": {"format": "pt"}}).encode() if header is None else header
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(values))


def write_bare_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    write_weights(folder / "model.safetensors", [bytes(10_000), bytes(10_000)])
    return folder
