"""The published models' dimensions, from their config.json; bf16 everywhere. What follows from them, tests compare with the
published sizes: parameters, KV bytes per token, embedding bytes and operations per image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from triptych.shared.checkpoint import ImageOptions
from triptych.shared.cost_model.images import ImageRule, NativeResolution, TiledCanvas, TilesAndThumbnail

BYTES_PER_VALUE = 2  # bf16


@dataclass(frozen=True, slots=True)
class TextTower:
    """A language model with gated MLPs. num_cross_layers of num_layers attend to images instead of text (CroAttn)."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    num_cross_layers: int = 0

    @property
    def num_self_layers(self) -> int:
        return self.num_layers - self.num_cross_layers

    @property
    def kv_params_per_layer(self) -> int:
        return 2 * self.hidden_size * self.num_kv_heads * self.head_size

    @property
    def params_per_token(self) -> int:
        """Weights of the linear layers that each text token is multiplied with."""
        per_layer = 2 * self.hidden_size * self.num_heads * self.head_size + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * per_layer + self.num_self_layers * self.kv_params_per_layer

    @property
    def head_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        return self.params_per_token + self.num_cross_layers * self.kv_params_per_layer + 2 * self.head_params

    @property
    def flops_per_pair(self) -> int:
        """Self-attention of one (query, key) pair: scores and weighted sum in every layer that has it."""
        return 4 * self.num_heads * self.head_size * self.num_self_layers

    @property
    def kv_bytes_per_layer(self) -> int:
        """KV of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_size * BYTES_PER_VALUE


@dataclass(frozen=True, slots=True)
class VisionTower:
    """num_full_layers of num_layers attend to all patches of a piece, the others to windows of window_patches. num_mlp: 3
    matrices for a gated MLP, else 2. connector_params: of the projector, per merged token of tokens_per_patch."""

    num_layers: int
    num_full_layers: int
    hidden_size: int
    intermediate_size: int
    num_mlp: int
    connector_params: int
    tokens_per_patch: float
    window_patches: int = 0

    @property
    def params_per_patch(self) -> int:
        per_layer = 4 * self.hidden_size**2 + self.num_mlp * self.hidden_size * self.intermediate_size
        return self.num_layers * per_layer

    @property
    def num_params(self) -> int:
        return self.params_per_patch + self.connector_params

    @property
    def flops_per_patch(self) -> float:
        """Linear layers, windows and connector."""
        windows = 4 * self.hidden_size * self.window_patches * (self.num_layers - self.num_full_layers)
        return 2 * self.params_per_patch + windows + 2 * self.connector_params * self.tokens_per_patch

    @property
    def flops_per_pair(self) -> int:
        return 4 * self.hidden_size * self.num_full_layers


@dataclass(frozen=True, slots=True)
class VisionLanguageModel:
    """A published model: its towers, and how it cuts pictures."""

    name: str
    text: TextTower
    vision: VisionTower
    images: ImageRule

    @property
    def weight_bytes(self) -> int:
        return BYTES_PER_VALUE * (self.text.num_params + self.vision.num_params)


_QWEN_IMAGES = ImageOptions(
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=56 * 56,  # preprocessor_config.json, as the next
    max_pixels=12_845_056,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
)
_QWEN = VisionLanguageModel(
    name="Qwen2.5-VL-7B",
    text=TextTower(28, 3584, 18944, 28, 4, 128, 152064),
    vision=VisionTower(
        32, 4, 1280, 3420, num_mlp=3, connector_params=5120 * (5120 + 3584), tokens_per_patch=1 / 4, window_patches=64
    ),
    images=NativeResolution(_QWEN_IMAGES),
)
_LLAMA = VisionLanguageModel(
    name="Llama-3.2-11B-Vision",
    text=TextTower(40, 4096, 14336, 32, 8, 128, 128256, num_cross_layers=8),
    vision=VisionTower(40, 40, 1280, 5120, num_mlp=2, connector_params=7680 * 4096, tokens_per_patch=1.0),  # 32 + 8 global
    images=TiledCanvas(tile_side=560, max_tiles=4, tokens_per_tile=1601),
)
_INTERNVL = VisionLanguageModel(
    name="InternVL2.5-26B",
    text=TextTower(48, 6144, 16384, 48, 8, 128, 92553),
    vision=VisionTower(45, 45, 3200, 12800, num_mlp=2, connector_params=6144 * (12800 + 6144), tokens_per_patch=256 / 1025),
    images=TilesAndThumbnail(tile_side=448, max_tiles=12, patches_per_tile=1025, tokens_per_tile=256),
)

MODELS: Mapping[str, VisionLanguageModel] = MappingProxyType(
    {"qwen2.5-vl-7b": _QWEN, "llama-3.2-11b": _LLAMA, "internvl2.5-26b": _INTERNVL}
)
