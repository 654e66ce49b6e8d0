"""What the stages of one instance cost: asked by the emulated engine, the simulator, policies and the profiler.

Times are seconds (_s), sizes are bytes, neither is ever negative. Pure: equal questions get equal answers, nothing is
random, queueing is the caller's. One CostModel is one instance: a model on `tp` GPUs, or on the CPU of a profile.
Made by published.py (GPU classes, any TP) or read by profile.py (measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from triptych.shared.cost_model.forms import MemoryCosts, PassCosts, PassWork, PreprocessCosts
from triptych.shared.cost_model.images import ImageRule, ImageShape
from triptych.shared.cost_model.unknowns import Link, Stage, Unknowns

Architecture = Literal["DecOnly", "CroAttn"]
Source = Literal["published", "measured"]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """num_tokens of one prompt, computed in this step after num_context_tokens of it whose KV is there.

    DecOnly: image tokens are among them, and num_image_tokens is 0. CroAttn: both count text only; num_image_tokens are
    those of all images of the request, whose KV is computed with the chunk that has no context.
    """

    num_tokens: int
    num_context_tokens: int = 0
    num_image_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token of each of num_sequences. num_context_tokens: sum over the sequences of what is in their KV.
    num_image_tokens: CroAttn only, the sum over their images, not counted in the context."""

    num_sequences: int
    num_context_tokens: int
    num_image_tokens: int = 0


def encode_work(images: Sequence[ImageShape]) -> PassWork:
    """Tokens are patches, sequences are images."""
    num_patches = sum(image.num_patches for image in images)
    return PassWork(num_patches, len(images), sum(image.num_pairs for image in images))


def prefill_work(chunks: Sequence[PrefillChunk], image_weight: float = 0.0, image_kv_share: float = 0.0) -> PassWork:
    """Pairs are causal: a token sees the context, and half of its own chunk on average.

    Args:
        image_weight: what attending to an image token costs, as a share of a text token (CroAttn; as in decode_work).
        image_kv_share: as in CostModel.
    """
    num_new_images = sum(chunk.num_image_tokens for chunk in chunks if not chunk.num_context_tokens)
    return PassWork(
        num_tokens=sum(chunk.num_tokens for chunk in chunks) + image_kv_share * num_new_images,
        num_sequences=len(chunks),
        num_pairs=sum(
            c.num_tokens * (c.num_context_tokens + c.num_tokens / 2 + image_weight * c.num_image_tokens) for c in chunks
        ),
        num_context_tokens=sum(c.num_context_tokens + c.num_tokens + image_weight * c.num_image_tokens for c in chunks),
    )


def decode_work(batch: DecodeBatch, image_weight: float = 0.0) -> PassWork:
    """A token for each sequence; reading the context costs, comparing with it doesn't."""
    num_context_tokens = batch.num_context_tokens + image_weight * batch.num_image_tokens
    return PassWork(batch.num_sequences, batch.num_sequences, 0.0, num_context_tokens)


@dataclass(frozen=True, slots=True)
class CostModel:
    """See the module's docstring. name: for people, such as `llama-3.2-11b on a100 x 4`. image_kv_share: what the KV of
    one image token costs to compute, as a share of a text token (CroAttn; else 0)."""

    name: str
    source: Source
    architecture: Architecture
    tp: int
    images: ImageRule
    preprocess: PreprocessCosts
    encode: PassCosts
    prefill: PassCosts
    decode: PassCosts
    memory: MemoryCosts
    unknowns: Unknowns
    image_kv_share: float = 0.0

    def image(self, width: int, height: int) -> ImageShape:
        """What the model makes of a picture of that many pixels."""
        return self.images.shape(width, height)

    def preprocess_s(self, width: int, height: int) -> float:
        """One picture as it was sent, on one CPU core. Pictures are the unit of parallelism: n cores take n at once."""
        return self.preprocess.fixed_s + self.preprocess.pixel_s * width * height

    def encode_s(self, images: Sequence[ImageShape]) -> float:
        """One batch through the vision tower, connector included."""
        return self.encode.pass_s(encode_work(images))

    def prefill_s(self, chunks: Sequence[PrefillChunk]) -> float:
        """One step over chunks of prompts."""
        return self.prefill.pass_s(prefill_work(chunks, self._image_weight, self.image_kv_share))

    def decode_s(self, batch: DecodeBatch) -> float:
        """One step: a token of each sequence."""
        return self.decode.pass_s(decode_work(batch, self._image_weight))

    def mixed_s(self, chunks: Sequence[PrefillChunk], batch: DecodeBatch) -> float:
        """One step over both (chunked prefill in the decode batch): the weights are read once."""
        if not chunks:
            return self.decode_s(batch)
        prompts, tokens = prefill_work(chunks, self._image_weight, self.image_kv_share), decode_work(batch, self._image_weight)
        linear = PassWork(
            num_tokens=prompts.num_tokens + tokens.num_tokens,
            num_sequences=prompts.num_sequences + tokens.num_sequences,
            num_pairs=prompts.num_pairs,
            num_context_tokens=prompts.num_context_tokens,
        )
        return self.prefill.pass_s(linear) + self.decode.context_s * tokens.num_context_tokens

    def colocated_s(self, alone_s: float, stage: Stage, beside: Sequence[Stage]) -> float:
        """What alone_s of `stage` becomes while other stages run on the same instance all the time (space sharing; stages
        that take turns don't slow each other down, they wait)."""
        return alone_s * self.unknowns.slowdown(stage, beside)

    def kv_bytes(self, num_tokens: int, num_image_tokens: int = 0) -> int:
        """KV of a sequence, whole over all GPUs of the instance. Token counts as in PrefillChunk."""
        memory = self.memory
        return memory.kv_bytes_per_token * num_tokens + memory.kv_bytes_per_image_token * num_image_tokens

    def embedding_bytes(self, image: ImageShape) -> int:
        """What an encoder hands to prefill: after the projector."""
        return self.memory.embedding_bytes_per_token * image.num_tokens

    def transfer_s(self, num_bytes: int, link: Link) -> float:
        """One pull, alone on its link: latency + bytes / bandwidth."""
        return self.unknowns.transfer_s(num_bytes, link)

    @property
    def startup_s(self) -> float:
        """From the decision to start an instance until it takes work: process, weights, warm-up."""
        return self.unknowns.startup_s(self.memory.weight_bytes / self.tp)

    @property
    def role_switch_s(self) -> float:
        """A drained instance's change of role; the weights stay."""
        return self.unknowns.role_switch_s

    @property
    def _image_weight(self) -> float:
        """An image token is attended to in fewer layers than a text token, in proportion to its KV (CroAttn)."""
        return self.memory.kv_bytes_per_image_token / self.memory.kv_bytes_per_token
