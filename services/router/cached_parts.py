"""What of one request is cached somewhere, as far as the index knows: its prompt is keyed as far as its pictures are known, in
order, and one question asks for all that became known since the last. The holders check again: a hint may be stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triptych.cache.block_keys import MAX_PACKED_KEYS_BYTES, BlockChain, root_key
from triptych.cache.index import CacheIndex
from triptych.cache.keys import KEY_BYTES
from triptych.cache.known_files import KnownFiles
from triptych.services.router.prompt import Prompt
from triptych.shared.checkpoint import ImageOptions
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import InstanceId
from triptych.shared.policies.policy_set import CacheRules

MAX_KEYS = MAX_PACKED_KEYS_BYTES // KEY_BYTES  # as many blocks are pulled from a peer
MIN_KEYS = 4  # chosen: to compute fewer blocks takes about as long as to ask, 1 ms of a request's TTFT (measured)


@dataclass(frozen=True, slots=True)
class Cache:
    """What all requests of a router share. model_revision, block_size: the keys depend on them. attends_to_all: pictures are
    seen by cross-attention, from before them too."""

    index: CacheIndex
    files: KnownFiles
    rules: CacheRules
    image: ImageOptions
    model_revision: str
    block_size: int
    attends_to_all: bool = False


@dataclass(slots=True)
class UnifiedSequence:
    """A prompt as far as it can be keyed. spans: first and last token, plus one, of the pictures in it so far."""

    prompt: Prompt
    cache: Cache
    cache_salt: bytes
    chain: BlockChain | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    _num_read: int = 0

    def advance(self, images: Sequence[ImageInfo | None]) -> None:
        """Go on to the first picture that is not known. Where the text before pictures sees them too, all must be known."""
        if self.chain is None:
            if self.cache.attends_to_all and None in images:
                return
            seen_by_all = [image.mm_hash for image in images if image is not None] if self.cache.attends_to_all else []
            root = root_key(self.cache.model_revision, self.cache.block_size, self.cache_salt, seen_by_all)
            self.chain = BlockChain(root, self.cache.block_size)
        token_ids = self.prompt.token_ids
        for image in images[len(self.spans) :]:
            at = self.prompt.placeholder_at[len(self.spans)]
            self.chain.extend(token_ids[self._num_read : at])
            self._num_read = at
            if image is None:
                return
            begin = self.chain.num_tokens
            self.chain.append_image(image.mm_hash, image.num_tokens)
            self.spans.append((begin, self.chain.num_tokens))
            self._num_read += 1
        self.chain.extend(token_ids[self._num_read :])
        self._num_read = len(token_ids)

    def usable_keys(self) -> Sequence[bytes]:
        """Of the full blocks that may come from a cache: never that of the last token, which is always computed."""
        if self.chain is None:
            return ()
        return self.chain.keys[: min(MAX_KEYS, (self.chain.num_tokens - 1) // self.cache.block_size)]


class CachedParts:
    """Of one attempt. prefixes: leading tokens of the prompt whose KV an instance holds. embeddings: a picture's holders, by
    mm_hash. num_relied_on: tokens whose KV must be where the prompt goes, since pictures in them were left out.

    Args:
        may_hold: whether what an instance holds is of use.
        is_asked: whether the index is.
    """

    def __init__(self, sequence: UnifiedSequence, may_hold: Callable[[InstanceId], bool], is_asked: bool) -> None:
        self._sequence = sequence
        self._cache = sequence.cache
        self._may_hold = may_hold
        self._is_asked = is_asked
        self._is_keyed = is_asked and self._cache.rules.keeps_kv
        self._may_grow = True
        self._num_asked = 0
        self.prefixes: dict[InstanceId, int] = {}
        self.embeddings: dict[bytes, tuple[InstanceId, ...]] = {}
        self.num_relied_on = 0

    def advance(self, images: Sequence[ImageInfo | None]) -> None:
        """images: those of the prompt, None where unknown."""
        if self._is_keyed:
            self._sequence.advance(images)

    async def ask(self, mm_hashes: Sequence[bytes] = ()) -> None:
        """For the KV of the prompt as far as it is keyed, unless that was asked for or is little, and these pictures'
        embeddings."""
        keys = self._sequence.usable_keys() if self._may_grow else ()
        if len(keys) == self._num_asked or len(keys) < MIN_KEYS:
            keys = ()
        wanted = mm_hashes if self._cache.rules.keeps_embeddings else ()
        if not self._is_asked or not (keys or wanted):
            return
        found = await self._cache.index.lookup(keys, wanted)
        self.embeddings.update(found.embeddings)
        if keys:
            self._num_asked = len(keys)
            block_size = self._cache.block_size
            self.prefixes = {id_: num * block_size for id_, num in found.prefixes.items() if self._may_hold(id_)}
            self._may_grow = self.num_cached >= len(keys) * block_size  # else what follows cannot be cached either

    @property
    def num_cached(self) -> int:
        """Leading tokens of which somebody holds the KV."""
        return max(self.prefixes.values(), default=0)

    def computed_prefixes(self) -> dict[InstanceId, int]:
        """`prefixes` without the tokens that prefill does not compute: pictures' where they are only attended to."""
        if not self._cache.attends_to_all:
            return self.prefixes
        spans = self._sequence.spans
        return {
            holder: num - sum(min(num, end) - min(num, begin) for begin, end in spans) for holder, num in self.prefixes.items()
        }

    def is_ripe(self, index: int) -> bool:
        """Whether it can be told if that picture's KV is cached: when the prompt is keyed to its end."""
        return index < len(self._sequence.spans) or not self._is_keyed

    def leave_out(self, index: int) -> bool:
        """Whether a picture's KV is cached, so that its embeddings are not needed; the prompt then relies on that."""
        if index >= len(self._sequence.spans):
            return False
        _, end = self._sequence.spans[index]
        if end > self.num_cached:
            return False
        self.num_relied_on = max(self.num_relied_on, end)
        return True

    def has_what_is_relied_on(self, holder: InstanceId) -> bool:
        return self.prefixes.get(holder, 0) >= self.num_relied_on

    def source(self) -> InstanceId | None:
        """Who holds all the KV that is relied on, most of those that are still there."""
        able = [id_ for id_ in sorted(self.prefixes) if self.has_what_is_relied_on(id_) and self._may_hold(id_)]
        return max(able, key=lambda id_: self.prefixes[id_], default=None)

    def num_blocks(self, holder: InstanceId) -> int:
        """Leading blocks of the prompt that an instance holds."""
        return self.prefixes.get(holder, 0) // self._cache.block_size
