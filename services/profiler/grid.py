"""Which passes are measured: batches, tokens, contexts and pictures that an instance with these settings really meets."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.shared.checkpoint import ImageOptions, grid_thw, num_image_tokens, resized
from triptych.shared.cost_model.api import DecodeBatch, PrefillChunk
from triptych.shared.settings import Settings


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pass may be at most, in tokens: of one sequence, of all KV blocks, of a prefill step, of an encode batch."""

    max_model_len: int
    num_kv_tokens: int
    max_prefill_tokens: int
    max_encode_tokens: int
    max_num_seqs: int
    image: ImageOptions

    @staticmethod
    def of(settings: Settings, max_model_len: int, num_kv_tokens: int, image: ImageOptions) -> Limits:
        """Those of an instance that serves with these settings."""
        return Limits(
            max_model_len,
            num_kv_tokens,
            settings.max_prefill_tokens,
            settings.max_encode_tokens,
            settings.max_num_seqs,
            image,
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """All chosen: powers of two, and contexts up to what chats have. *_sides: pixels of square pictures."""

    picture_sides: tuple[int, ...]
    image_sides: tuple[int, ...]
    image_batches: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    num_prompts: tuple[int, ...]
    chunk_contexts: tuple[int, ...]
    decode_batches: tuple[int, ...]
    decode_contexts: tuple[int, ...]


QUICK = Grid(
    picture_sides=(64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536),
    image_sides=(56, 112, 168, 224, 336, 448, 672, 896),
    image_batches=(1, 2, 4, 8),
    chunk_tokens=(16, 64, 128, 256, 512),
    num_prompts=(1, 2, 4, 8),
    chunk_contexts=(0, 512, 1536),
    decode_batches=(1, 2, 4, 8, 16, 32, 64),
    decode_contexts=(32, 256, 1024, 2048),
)
FULL = Grid(
    picture_sides=(*QUICK.picture_sides, 1792, 2048, 2560, 3072),
    image_sides=(*QUICK.image_sides, 1120, 1344, 1792),
    image_batches=(1, 2, 3, 4, 6, 8, 16),
    chunk_tokens=(16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048),
    num_prompts=(1, 2, 4, 8, 16),
    chunk_contexts=(0, 256, 512, 1024, 2048, 4096, 8192),
    decode_batches=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128),
    decode_contexts=(32, 128, 256, 512, 1024, 2048, 4096, 8192),
)


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """num_images pictures of height x width, which are multiples of what the model wants."""

    height: int
    width: int
    num_images: int


def picture_sizes(grid: Grid, max_image_pixels: int) -> list[tuple[int, int]]:
    """Width and height of pictures as they are sent, every other one in portrait or landscape."""
    sizes = [(side, side * 3 // 4) if i % 2 else (side, side) for i, side in enumerate(grid.picture_sides)]
    return [(width, height) for width, height in sizes if width * height <= max_image_pixels]


def encode_batches(grid: Grid, limits: Limits) -> list[ImageBatch]:
    """Pictures after the model's resize; sizes that it makes equal are measured once."""
    batches: dict[ImageBatch, None] = {}
    for side in grid.image_sides:
        height, width = resized(side, side, limits.image)
        num_tokens = num_image_tokens(grid_thw(height, width, limits.image), limits.image)
        for num_images in grid.image_batches:
            if num_images == 1 or num_images * num_tokens <= limits.max_encode_tokens:
                batches[ImageBatch(height, width, num_images)] = None
    return list(batches)


def prefill_steps(grid: Grid, limits: Limits) -> list[list[PrefillChunk]]:
    """One chunk with each context, and several whole prompts at once."""
    steps = [
        [PrefillChunk(num_tokens, num_context)] * num_prompts
        for num_tokens in grid.chunk_tokens
        for num_prompts in grid.num_prompts
        for num_context in (grid.chunk_contexts if num_prompts == 1 else (0,))
    ]
    return [step for step in steps if _fits(step, limits)]


def decode_batches(grid: Grid, limits: Limits) -> list[DecodeBatch]:
    """Sequences of one length, which have room for one more token."""
    return [
        DecodeBatch(num_sequences, num_sequences * num_context)
        for num_sequences in grid.decode_batches
        for num_context in grid.decode_contexts
        if num_sequences <= limits.max_num_seqs
        and num_context < limits.max_model_len
        and num_sequences * (num_context + 1) <= limits.num_kv_tokens
    ]


def _fits(step: list[PrefillChunk], limits: Limits) -> bool:
    lengths = [chunk.num_context_tokens + chunk.num_tokens for chunk in step]
    is_short = max(lengths) <= limits.max_model_len and sum(lengths) <= limits.num_kv_tokens
    return is_short and sum(chunk.num_tokens for chunk in step) <= limits.max_prefill_tokens
