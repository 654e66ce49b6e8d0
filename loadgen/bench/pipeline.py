"""What a perfect pipeline takes for a request with several images: the bound that bench overlap prints. Pure.

Images are encoded in order, piece by piece where they have several, by whichever encoder is free; the prompt is computed up to
the first piece that has not landed, and on as more land. Nothing but encoding and prefill takes time: no messages, no
transfers, no queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.shared.cost_model.api import CostModel, PrefillChunk
from triptych.shared.cost_model.images import ImageShape


@dataclass(frozen=True, slots=True)
class Pipeline:
    """encoder, prefill: what one instance of each costs. Modelled seconds."""

    encoder: CostModel
    prefill: CostModel
    num_encoders: int

    def landings_s(self, images: Sequence[ImageShape], ready_s: Sequence[float]) -> list[float]:
        """When each piece is encoded, of one image after the other. ready_s: when the pixels of each image are there."""
        free_at_s = [0.0] * self.num_encoders
        landed_s = []
        for image, pixels_s in zip(images, ready_s, strict=True):
            piece_s = self.encoder.encode_s([image]) / image.num_pieces
            for _ in range(image.num_pieces):
                first = min(range(self.num_encoders), key=free_at_s.__getitem__)
                free_at_s[first] = max(free_at_s[first], pixels_s) + piece_s
                landed_s.append(free_at_s[first])
        return landed_s

    def first_token_s(self, images: Sequence[ImageShape], landed_s: Sequence[float], num_text_tokens: int) -> float:
        """When the prompt is computed: the images, then the text. landed_s: of each piece."""
        pieces = [image.num_tokens // image.num_pieces for image in images for _ in range(image.num_pieces)]
        at_s, num_done, place = 0.0, 0, 0
        while place < len(pieces):
            at_s = max(at_s, landed_s[place])
            begin = place
            while place < len(pieces) and landed_s[place] <= at_s:
                place += 1
            num_new = sum(pieces[begin:place])
            is_last = place == len(pieces)
            at_s += self.prefill.prefill_s([PrefillChunk(num_new + (num_text_tokens if is_last else 0), num_done)])
            num_done += num_new
        return at_s

    def prefill_to_encode(self, images: Sequence[ImageShape]) -> float:
        """How long images are computed by prefill, over how long they are encoded one by one."""
        num_tokens = sum(image.num_tokens for image in images)
        return self.prefill.prefill_s([PrefillChunk(num_tokens)]) / sum(self.encoder.encode_s([image]) for image in images)
