"""What an engine is to the roles: encode images, run a batch of sequence chunks, export and import KV blocks.

Engines are synchronous and single-threaded: the instance host calls them on its one engine thread. Roles own the queues
and the `Sequence` objects; the engine owns weights and the KV cache. Implementations: torch_engine.py, emulated.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from triptych.shared.engine.paged_kv import BlockPool
from triptych.shared.image_info import ImageInfo
from triptych.shared.instance_info import ModelCard
from triptych.shared.messages import RequestId
from triptych.shared.sampling_params import SamplingParams, TokenLogprobs

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch

    from triptych.shared.engine.penalties import TokenCounts


@dataclass(slots=True)
class ImageSpan:
    """An image inside a sequence: placeholders [offset, offset + num_tokens). embeddings: [num_tokens, D], None while they are
    not needed, since its KV is there already, or not there yet."""

    offset: int
    image: ImageInfo
    embeddings: torch.Tensor | None

    @property
    def end(self) -> int:
        return self.offset + self.image.num_tokens


@dataclass(slots=True)
class Sequence:
    """One request as the engine sees it. Mutable, owned by one role, used on the engine thread.

    token_ids: prompt (placeholders expanded) and the output so far. The first num_computed_tokens of them have their KV
    in block_table, whose blocks hold block_size tokens each and must cover what is computed next.
    positions: int64 [3, num_prompt_tokens] rotary positions of the prompt, set by Engine.prepare; later tokens are at
    index + position_delta. prompt_token_set: the prompt's ids as bits (see DecodeRequest) where token_ids doesn't know them.
    token_counts: the sampler's, for penalties. logprobs: of the token that Engine.run gave last, where sampling asks.
    """

    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    images: list[ImageSpan] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    positions: torch.Tensor | None = None
    position_delta: int = 0
    prompt_token_set: bytes = b""
    token_counts: TokenCounts | None = None
    logprobs: TokenLogprobs | None = None
    is_plain_greedy: bool = field(init=False)  # kept: asked at every step

    def __post_init__(self) -> None:
        self.is_plain_greedy = self.sampling.is_plain_greedy

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the next num_tokens tokens of `sequence` (from num_computed_tokens on)."""

    sequence: Sequence
    num_tokens: int


class Engine(Protocol):
    """See the module's docstring. block_pool is pure bookkeeping and may be used on the event loop. embedding_bytes: of one
    vision token. attends_to_all: text before an image attends to it, too (cross-attention)."""

    model_card: ModelCard
    block_pool: BlockPool
    block_size: int
    embedding_bytes: int
    attends_to_all: bool
    kv_layout: str  # equal on two instances iff blocks can move between them: model, revision, dtype, layers, heads, block size

    def encode(self, images: Seq[ImageInfo], pixels: Seq[torch.Tensor]) -> list[torch.Tensor]:
        """Run the vision tower. pixels: uint8 [height, width, 3] each. Returns [num_tokens, D] each, in model dtype.

        Raises:
            InternalError: an image's num_tokens is not what the vision tower made of it.
        """
        ...

    def prepare(self, sequence: Sequence) -> None:
        """Fill in positions and position_delta of a new sequence, whose images need no embeddings for that.

        Raises:
            InternalError: placeholders in token_ids don't match `images`.
        """
        ...

    def run(self, chunks: Seq[Chunk]) -> list[int | None]:
        """One forward pass over all chunks; advances num_computed_tokens. A chunk that reaches the end of its token_ids
        gives the next token (not appended by the engine), the others None, and its Sequence.logprobs where they are asked
        for. The same tokens come out however a sequence is cut in chunks, batched, or moved, but for float ties."""
        ...

    def export_blocks(self, block_ids: Seq[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """A contiguous copy, [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim], into `out` when given."""
        ...

    def import_blocks(self, blocks: torch.Tensor, block_ids: Seq[int]) -> None:
        """Write what export_blocks returned (anywhere with an equal kv_layout) into block_ids."""
        ...

    def exported_shape(self, num_blocks: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of export_blocks for that many blocks."""
        ...
