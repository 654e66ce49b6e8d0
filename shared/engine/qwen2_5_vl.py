"""What is particular to Qwen2.5-VL: its transformers model, vision tower call, and multimodal rotary positions.

Another family gets a module of this shape. Shapes: T packed tokens, R rows that are asked for, D model, P patches.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
import transformers
from torch.nn.functional import embedding, linear

from triptych.shared.checkpoint import Checkpoint
from triptych.shared.engine import fused_text, fused_vision
from triptych.shared.engine.attention import ATTENTION_NAME, paged_attention
from triptych.shared.engine.batch_plan import BatchPlan
from triptych.shared.engine.weights import PackedWeight, pays_to_pack
from triptych.shared.errors import BadRequest
from triptych.shared.image_info import ImageInfo

_untyped: Any = transformers  # most of transformers has no annotations
_Model: Any = _untyped.Qwen2_5_VLForConditionalGeneration  # imported with this module: what is forked later has it


class Qwen25VL:
    """A loaded model. num_layers, num_kv_heads, head_size size the KV cache, whose keys have their heads in key_order;
    hidden_size is that of embeddings."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        """Raises BadRequest when the checkpoint is of a kind that this can't run."""
        _untyped.AttentionInterface.register(ATTENTION_NAME, paged_attention)
        _untyped.utils.logging.disable_progress_bar()
        # from_pretrained builds on the meta device and assigns the tensors of the safetensors files
        self._model: Any = _Model.from_pretrained(
            checkpoint.path,
            dtype=dtype,
            attn_implementation={"": "sdpa", "text_config": ATTENTION_NAME, "vision_config": "sdpa"},
            use_safetensors=True,
            local_files_only=True,
        )
        self._model.eval().requires_grad_(False).to(device)
        text = self._model.config.text_config
        if set(text.layer_types) != {"full_attention"}:
            raise BadRequest("sliding-window text attention is not supported", code="unsupported_model")
        self._device = device
        self._language_model = self._model.model.language_model
        self._fused: fused_text.FusedText | None = None
        if fused_text.can_fuse(self._language_model):
            self._fused = fused_text.FusedText(self._language_model, _rotary_axes(text.rope_parameters["mrope_section"]))
        self._vision: fused_vision.FusedVision | None = None
        if fused_vision.can_fuse(self._model.model.visual):
            self._vision = fused_vision.FusedVision(self._model.model.visual)
            del self._model.model.visual
        head: torch.Tensor = self._model.lm_head.weight
        self._packed_head = PackedWeight(head) if pays_to_pack(head) else None
        if self._packed_head is not None:
            del self._model.lm_head  # where embeddings are tied to it they stay
        self.key_order = "halves" if self._fused is None else fused_text.KEY_ORDER
        self.num_layers: int = text.num_hidden_layers
        self.num_heads: int = text.num_attention_heads
        self.num_kv_heads: int = text.num_key_value_heads
        self.head_size: int = text.hidden_size // text.num_attention_heads
        self.hidden_size: int = text.hidden_size
        self.vocab_size: int = text.vocab_size

    def call_between_parts(self, call: Callable[[], None]) -> None:
        """Of passes that take a while."""
        for fused in (self._vision, self._fused):
            if fused is not None:
                fused.between_parts = call

    def encode(self, patches: torch.Tensor, images: Seq[ImageInfo]) -> list[torch.Tensor]:
        """patches: [P of all images, C * T * S * S]. Returns [num_tokens, D] for each image."""
        if self._vision is not None:
            embeddings = self._vision.forward(patches, [image.grid_thw for image in images])
            return list(torch.split(embeddings, [image.num_tokens for image in images]))
        grids = torch.tensor([image.grid_thw for image in images], device=self._device)
        features = self._model.model.get_image_features(patches, grids).pooler_output
        return list(features)

    def rotary_positions(self, token_ids: Seq[int], images: Seq[ImageInfo]) -> tuple[torch.Tensor, int]:
        """Positions int64 [3, T] (time, height, width) of a prompt, and what to add to the index of later tokens."""
        tokens_1T = torch.tensor([token_ids])
        if not images:
            return torch.arange(tokens_1T.shape[1]).expand(3, -1), 0
        token_types = (tokens_1T == self._model.config.image_token_id).int()
        grids = torch.tensor([image.grid_thw for image in images])
        positions, delta = self._model.model.get_rope_index(tokens_1T, mm_token_type_ids=token_types, image_grid_thw=grids)
        return positions[:, 0], int(delta)

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return embedding(tokens_T, self._language_model.embed_tokens.weight)

    def forward(self, embeds_TD: torch.Tensor, positions_3T: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Hidden states [R, D] of plan.last_rows; the embeddings may be overwritten."""
        if self._fused is not None:
            return self._fused.forward(embeds_TD, positions_3T, plan)
        # a ready-made mask mapping keeps transformers from building a mask over the packed row; the plan has our own
        states: torch.Tensor = self._language_model(
            inputs_embeds=embeds_TD.unsqueeze(0),
            position_ids=positions_3T.unsqueeze(1),
            attention_mask={"full_attention": None},
            use_cache=False,
            plan=plan,
        ).last_hidden_state[0]
        return states if plan.last_rows is None else states[plan.last_rows]

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        if self._packed_head is None:
            return linear(hidden_RD, self._model.lm_head.weight)
        return self._packed_head.product(hidden_RD)


def _rotary_axes(sections: Seq[int]) -> torch.Tensor:
    """Which of the three positions turns each frequency: they take turns, section by section."""
    return torch.tensor([number % 3 for number, size in enumerate(sections) for _ in range(size)])
