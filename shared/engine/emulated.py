"""The emulated engine: no model, no tensors. Calls take the time that a cost model says; the KV blocks are really counted.

The same prompt, pictures and seed give the same text, which is noise in English words. Synchronous, see api.py; time passes in
emulated_calls.py. No torch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import repeat
from typing import TYPE_CHECKING, cast

from blake3 import blake3

from triptych.shared.checkpoint import Checkpoint
from triptych.shared.cost_model.api import CostModel, DecodeBatch, PrefillChunk
from triptych.shared.cost_model.images import ImageShape
from triptych.shared.emulation import num_slots, word_ids
from triptych.shared.engine.api import Chunk, Sequence
from triptych.shared.engine.paged_kv import BlockPool
from triptych.shared.errors import BadRequest, InternalError
from triptych.shared.image_info import ImageInfo
from triptych.shared.sampling_params import MIN_TEMPERATURE, TokenLogprobs
from triptych.shared.settings import Settings
from triptych.shared.transport.stand_in import UINT8, StandIn, stand_in

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch

MEAN_OUTPUT_TOKENS = 250  # chosen: outputs that nothing else bounds end at random, after so many on average
NUMBERS_BYTES = 2 * array("I").itemsize  # that are drawn for a token
HOST_BYTES_PER_S = 25e9  # chosen: PCIe 4 x16 between a GPU and its host's memory carries 32 GB/s at most


class EmulatedEngine:
    """Implements Engine.

    Args:
        spend: told the modelled seconds of each call (EmulatedCalls.spend).
    """

    def __init__(self, cost: CostModel, checkpoint: Checkpoint, settings: Settings, spend: Callable[[float], None]) -> None:
        self._cost = cost
        self._spend = spend
        self._words = word_ids()
        self._slots_per_image_token = num_slots(cost, 1 << 20) / (1 << 20)
        self.block_size = settings.block_size
        self.attends_to_all = cost.architecture == "CroAttn"
        self.embedding_bytes = round(cost.memory.embedding_bytes_per_token / self._slots_per_image_token)
        self._kv_token_bytes = cost.kv_bytes(1)
        num_blocks = settings.kv_cache_bytes // (self._kv_token_bytes * self.block_size)
        if num_blocks < 1:
            raise BadRequest("kv_cache_bytes is less than one KV block", code="bad_setting")
        self.block_pool = BlockPool(num_blocks)
        limits = (checkpoint.max_position_embeddings, num_blocks * self.block_size, settings.max_model_len)
        self.model_card = checkpoint.card(min(limit for limit in limits if limit > 0))
        self.kv_layout = f"emulated/{checkpoint.revision}/{self.block_size}"

    def encode(self, images: Seq[ImageInfo], pixels: Seq[torch.Tensor]) -> list[torch.Tensor]:
        shapes = [_shape_of(image) for image in images]
        self._spend(self._cost.encode_s(shapes))
        return [stand_in((image.num_tokens, self.embedding_bytes)) for image in images]

    def prepare(self, sequence: Sequence) -> None:
        """position_delta of a cross-attention model: its pictures are no positions (decode knows their number by that)."""
        if self.attends_to_all:
            sequence.position_delta = -sum(span.image.num_tokens for span in sequence.images)

    def run(self, chunks: Seq[Chunk]) -> list[int | None]:
        prompts: list[Chunk] = []
        running: list[Chunk] = []
        for chunk in chunks:  # output that was made elsewhere is computed again as a prompt is
            is_prompt = chunk.sequence.num_computed_tokens < chunk.sequence.num_prompt_tokens or chunk.num_tokens > 1
            (prompts if is_prompt else running).append(chunk)
        work = [part for part in map(self._prefill_chunk, prompts) if part.num_tokens]
        self._spend(self._cost.mixed_s(work, self._decode_batch([chunk.sequence for chunk in running])))
        for chunk in chunks:
            self.advance(chunk.sequence, chunk.num_tokens)
        return [self._next(chunk.sequence) for chunk in chunks]

    def decode_s(self, sequences: Seq[Sequence]) -> float:
        """Modelled seconds of their next decode step."""
        return self._cost.decode_s(self._decode_batch(sequences))

    def foresee(self, sequences: Seq[Sequence], most: int) -> tuple[list[list[int]], list[float]]:
        """Their next decode steps: tokens of each sequence, as many of one as of the other, and modelled seconds of each step;
        none after one that ends an output with a stop token. None has happened before `advance`."""
        outputs = [self._say(sequence, most) for sequence in sequences]
        batch, num_steps = self._decode_batch(sequences), min(map(len, outputs))
        size, context = batch.num_sequences, batch.num_context_tokens
        batches = (DecodeBatch(size, context + step * size, batch.num_image_tokens) for step in range(num_steps))
        return [output[:num_steps] for output in outputs], [self._cost.decode_s(batch) for batch in batches]

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """So many tokens are computed, more than it has where they were foreseen."""
        num_computed_tokens = sequence.num_computed_tokens + num_tokens
        if num_computed_tokens > len(sequence.block_table) * self.block_size:
            raise InternalError("a chunk goes beyond its KV blocks")
        sequence.num_computed_tokens = num_computed_tokens

    def export_blocks(self, block_ids: Seq[int], out: torch.Tensor | None = None) -> torch.Tensor:
        copy = stand_in(self.exported_shape(len(block_ids))[0]) if out is None else out
        self._spend_host_copy(copy)
        return copy

    def import_blocks(self, blocks: torch.Tensor, block_ids: Seq[int]) -> None:
        if blocks.shape != self.exported_shape(len(block_ids))[0]:
            raise InternalError("KV blocks of another size are imported", code="kv_layout")
        self._spend_host_copy(blocks)

    def exported_shape(self, num_blocks: int) -> tuple[tuple[int, ...], torch.dtype]:
        return (num_blocks, self.block_size, self._kv_token_bytes), UINT8

    def _spend_host_copy(self, blocks: torch.Tensor) -> None:
        """What a peer pulls goes from one accelerator to the other, as long as the transport says."""
        if cast(StandIn, blocks).is_in_host_memory:
            self._spend(blocks.nbytes / HOST_BYTES_PER_S)

    def _prefill_chunk(self, chunk: Chunk) -> PrefillChunk:
        sequence, first = chunk.sequence, chunk.sequence.num_computed_tokens
        if not self.attends_to_all:
            return PrefillChunk(chunk.num_tokens, first)
        before = self._num_placed(sequence, first)
        here = self._num_placed(sequence, first + chunk.num_tokens) - before
        return PrefillChunk(chunk.num_tokens - here, first - before, self._num_image_tokens(sequence))

    def _decode_batch(self, sequences: Seq[Sequence]) -> DecodeBatch:
        context = sum(sequence.num_computed_tokens + sequence.position_delta for sequence in sequences)
        num_image_tokens = sum(map(self._num_image_tokens, sequences)) if self.attends_to_all else 0
        return DecodeBatch(len(sequences), context, num_image_tokens)

    def _num_placed(self, sequence: Sequence, end: int) -> int:
        """Slots of pictures among the first `end` of the prompt."""
        return sum(min(max(end - span.offset, 0), span.image.num_tokens) for span in sequence.images)

    def _num_image_tokens(self, sequence: Sequence) -> int:
        """Tokens that only cross-attention sees."""
        return round(-sequence.position_delta / self._slots_per_image_token)

    def _next(self, sequence: Sequence) -> int | None:
        num_left = len(sequence.token_ids) - sequence.num_computed_tokens
        if num_left < 0:
            raise InternalError("a chunk goes beyond its tokens")
        if num_left:
            return None
        num_logprobs = sequence.sampling.num_logprobs
        if num_logprobs is not None:
            even = -math.log(len(self._words))  # what it draws from: any word is as likely as another
            sequence.logprobs = TokenLogprobs(even, tuple(zip(self._words[:num_logprobs], repeat(even))))
        return self._say(sequence, 1)[0]

    def _say(self, sequence: Sequence, most: int) -> list[int]:
        """The next tokens, until one ends the output."""
        stop_token_ids, words, num_words = sequence.sampling.stop_token_ids, self._words, len(self._words)
        drawn = _draw(sequence, most)
        said = [words[number % num_words] for number in drawn[::2]]
        if not stop_token_ids:
            return said
        num_free = sequence.sampling.min_tokens - sequence.num_output_tokens  # of which none may be the end
        for place, number in enumerate(drawn[1::2]):
            if place >= num_free and number % MEAN_OUTPUT_TOKENS == 0:
                said[place] = stop_token_ids[0]
            if said[place] in stop_token_ids:
                return said[: place + 1]
        return said


def _draw(sequence: Sequence, num_tokens: int) -> array[int]:
    """Two numbers for each of the next tokens, that only prompt, pictures, place in the output, and seed (unless greedy)
    decide. After the first token they go by that one: a decode instance has not seen the prompt. (A prompt that was too long
    for a message is zeros here.)"""
    sampling, num_prompt_tokens, place = sequence.sampling, sequence.num_prompt_tokens, sequence.num_output_tokens
    digest = blake3(b"%d" % (sampling.seed if sampling.temperature >= MIN_TEMPERATURE else 0))
    if place:
        digest.update(array("I", sequence.token_ids[num_prompt_tokens : num_prompt_tokens + 1]).tobytes())
    else:
        digest.update(array("I", sequence.token_ids).tobytes())
        for span in sequence.images:
            if not span.image.first_piece:  # the same text in however many parts a picture came
                digest.update(span.image.mm_hash)
    numbers = array("I")
    numbers.frombytes(digest.digest(NUMBERS_BYTES * num_tokens, seek=NUMBERS_BYTES * place))
    return numbers


def _shape_of(image: ImageInfo) -> ImageShape:
    """An emulated preprocess instance tells pieces and patches in the grid."""
    pieces, height, width = image.grid_thw
    return ImageShape(image.num_tokens, pieces, height * width)
