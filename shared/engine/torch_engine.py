"""The torch engine: a transformers model over a paged KV cache, one forward pass over a mixed batch of chunks.

Synchronous and single-threaded, see api.py. export_blocks and import_blocks may run beside `run` on another thread: they
touch only the blocks that they are given. Shapes: T packed tokens, D model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from triptych.shared.checkpoint import Checkpoint
from triptych.shared.engine.api import Chunk, ImageSpan, Sequence
from triptych.shared.engine.batch_plan import plan_batch
from triptych.shared.engine.kv_cache import KvCache
from triptych.shared.engine.paged_group import PagedGroups
from triptych.shared.engine.paged_kv import BlockPool
from triptych.shared.engine.positions import check_chunk, check_prompt, packed_positions
from triptych.shared.engine.qwen2_5_vl import Qwen25VL
from triptych.shared.engine.sampling import sample
from triptych.shared.engine.shared_cores import Cores
from triptych.shared.engine.vision import check_image, patchify
from triptych.shared.errors import BadRequest, InternalError
from triptych.shared.image_info import ImageInfo
from triptych.shared.instance_info import ModelCard
from triptych.shared.settings import Settings

_FAMILIES = {"qwen2_5_vl": Qwen25VL}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_engine(checkpoint: Checkpoint, settings: Settings) -> TorchEngine:
    """Load weights and make the KV cache.

    Raises:
        BadRequest: the model's family is not supported, or the device or the memory given can't hold it.
    """
    family = _FAMILIES.get(checkpoint.model_type)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise BadRequest(f"model type {checkpoint.model_type!r} is not one of {known}", code="unsupported_model")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BadRequest("device is cuda, but torch sees no CUDA device", code="bad_setting")
    if settings.dtype == "float32":
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32: cuDNN's default rounds the patch embedding to TF32
    return TorchEngine(family(checkpoint, _DTYPES[settings.dtype], torch.device(settings.device)), checkpoint, settings)


class TorchEngine:
    """Implements Engine."""

    def __init__(self, model: Qwen25VL, checkpoint: Checkpoint, settings: Settings) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._dtype = _DTYPES[settings.dtype]
        self._device = torch.device(settings.device)
        self.block_size = settings.block_size
        self.embedding_bytes = model.hidden_size * self._dtype.itemsize
        self.attends_to_all = False
        layout = (2, model.num_kv_heads, self.block_size, model.head_size)
        block_bytes = self._dtype.itemsize * model.num_layers * math.prod(layout)
        num_blocks = settings.kv_cache_bytes // block_bytes
        if num_blocks < 1:
            raise BadRequest(f"kv_cache_bytes is less than one KV block, {block_bytes} bytes", code="bad_setting")
        self.block_pool = BlockPool(num_blocks)
        self._kv = KvCache((model.num_layers, num_blocks, *layout), self._dtype, self._device)
        is_paged = self._device.type == "cpu" and self._dtype == torch.float32
        self._paged = PagedGroups(self._kv, model.num_heads) if is_paged else None
        limits = [checkpoint.max_position_embeddings, num_blocks * self.block_size, settings.max_model_len]
        self.model_card = ModelCard(
            name=checkpoint.name,
            revision=checkpoint.revision,
            max_model_len=min(limit for limit in limits if limit > 0),
            random_weights=checkpoint.random_weights,
        )
        sizes = f"{model.num_layers}x{model.num_kv_heads}x{model.head_size}"
        kind = f"{checkpoint.model_type}/{checkpoint.revision}/{settings.dtype}"
        self.kv_layout = f"{kind}/{sizes}/{model.key_order}/{self.block_size}"

    def share_cores(self, cores: Cores) -> None:
        """With those who compute beside: also in the middle of a pass."""
        self._model.call_between_parts(cores.take_again)

    @torch.inference_mode()
    def encode(self, images: Seq[ImageInfo], pixels: Seq[torch.Tensor]) -> list[torch.Tensor]:
        options = self._checkpoint.image
        for image, picture in zip(images, pixels, strict=True):
            check_image(image, picture, options)
        patches = torch.cat([patchify(picture.to(self._device), options) for picture in pixels])
        embeddings = self._model.encode(patches, images)
        for image, embedded in zip(images, embeddings, strict=True):
            if tuple(embedded.shape) != (image.num_tokens, self._model.hidden_size):
                raise InternalError(f"the vision tower made {tuple(embedded.shape)} of an image of {image.num_tokens} tokens")
        if len(embeddings) > 1:  # each its own memory: those of a batch are views of one tensor, which one of them would keep
            embeddings = [embedded.clone() for embedded in embeddings]
        return embeddings

    def prepare(self, sequence: Sequence) -> None:
        check_prompt(sequence, self._checkpoint.image_token_id, self._model.vocab_size)
        for span in sequence.images:
            if span.embeddings is not None:
                self._embeddings_of(span)
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        images = [span.image for span in sequence.images]
        sequence.positions, sequence.position_delta = self._model.rotary_positions(prompt, images)

    @torch.inference_mode()
    def run(self, chunks: Seq[Chunk]) -> list[int | None]:
        for chunk in chunks:
            check_chunk(chunk, self.block_size)
        plan = plan_batch(chunks, self._kv, self._paged)
        ordered = [chunks[i] for i in plan.order]
        positions_3T = packed_positions(ordered).to(self._device)
        hidden_RD = self._model.forward(self._embeddings(ordered), positions_3T, plan)
        tokens: list[int | None] = [None] * len(chunks)
        if plan.finishing:
            logits_RV = self._model.logits(hidden_RD)
            sequences = [chunks[i].sequence for i in plan.finishing]
            for i, token in zip(plan.finishing, sample(logits_RV, sequences), strict=True):
                tokens[i] = token
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
        return tokens

    @torch.inference_mode()
    def export_blocks(self, block_ids: Seq[int], out: torch.Tensor | None = None) -> torch.Tensor:
        return self._kv.export(block_ids, out)

    @torch.inference_mode()
    def import_blocks(self, blocks: torch.Tensor, block_ids: Seq[int]) -> None:
        self._kv.import_(blocks, block_ids)

    def exported_shape(self, num_blocks: int) -> tuple[tuple[int, ...], torch.dtype]:
        return self._kv.exported_shape(num_blocks), self._dtype

    def _embeddings(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """[T, D], one chunk after another, with images in place of their placeholders."""
        token_ids: list[int] = []
        placed: list[tuple[int, torch.Tensor]] = []
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
            end = start + chunk.num_tokens
            for span in sequence.images:
                first, last = max(start, span.offset), min(end, span.offset + span.image.num_tokens)
                if first < last:
                    part = self._embeddings_of(span)[first - span.offset : last - span.offset]
                    placed.append((len(token_ids) + first - start, part))
            token_ids.extend(sequence.token_ids[start:end])
        embeds_TD = self._model.embed(torch.tensor(token_ids, device=self._device))
        for row, part in placed:
            embeds_TD[row : row + len(part)] = part.to(embeds_TD)
        return embeds_TD

    def _embeddings_of(self, span: ImageSpan) -> torch.Tensor:
        if span.embeddings is None or tuple(span.embeddings.shape) != (span.image.num_tokens, self._model.hidden_size):
            raise InternalError("an image's embeddings are not there, or don't fit its span", code="invalid_image_spans")
        return span.embeddings
