"""What plain transformers answers: greedy `generate` of one request at a time, to compare an engine or a cluster with.

Token equality has one excuse, float ties: where the reference's two best logits are closer than TIE_GAP, either token is
right, and what follows is a different text. Needs torch; only checks import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

TIE_GAP = 1e-4  # float32 results move by 1e-7 to 1e-6 relative with the shape of the batch
_untyped: Any = transformers  # most of transformers has no annotations


@dataclass(frozen=True, slots=True)
class Answer:
    """Output tokens, and at each of them the gap between the two best logits."""

    token_ids: list[int]
    gaps: list[float]

    def difference(self, token_ids: Sequence[int]) -> int | None:
        """Index of the first token of another greedy output (of the same length limit) that differs without an excuse."""
        for i, expected in enumerate(self.token_ids):
            if i >= len(token_ids) or token_ids[i] != expected:
                return None if self.gaps[i] < TIE_GAP else i
        return None if len(token_ids) == len(self.token_ids) else len(self.token_ids)


class Reference:
    """The checkpoint in transformers' own classes."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        _untyped.utils.logging.disable_progress_bar()
        self._device = device
        self.model: Any = _untyped.Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=dtype).eval().to(device)
        self.image_processor: Any = _untyped.Qwen2VLImageProcessorPil.from_pretrained(path)
        self.image_token_id: int = self.model.config.image_token_id

    def image_grid(self, picture: Image.Image) -> tuple[int, int, int]:
        """Patch grid (t, h, w) of a picture."""
        t, h, w = self.image_processor(images=[picture], return_tensors="pt")["image_grid_thw"][0].tolist()
        return t, h, w

    def generate(
        self, prompt: Sequence[int], pictures: Sequence[Image.Image], max_tokens: int, ignore_eos: bool = False
    ) -> Answer:
        """Greedy answer to a prompt with all placeholders expanded. A stop token is the answer's last one."""
        input_ids = torch.tensor([list(prompt)], device=self._device)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        if pictures:
            inputs |= self.image_processor(images=list(pictures), return_tensors="pt").to(self._device)
            inputs["mm_token_type_ids"] = (input_ids == self.image_token_id).int()
        if ignore_eos:
            inputs["eos_token_id"] = None
        with torch.inference_mode():
            output = self.model.generate(
                **inputs, do_sample=False, max_new_tokens=max_tokens, return_dict_in_generate=True, output_logits=True
            )
        best = torch.stack(output.logits)[:, 0].float().topk(2).values
        return Answer(output.sequences[0, input_ids.shape[1] :].tolist(), (best[:, 0] - best[:, 1]).tolist())
