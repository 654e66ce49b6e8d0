"""What follows from a cost model for running it: batch sizes under an SLO, tipping point, capacity M_C, TP.

ModServe (arXiv 2502.00937) reads these off its offline profiles. Its text instances chunk prompts into the decode batch, as
modelled here. Its rule for queueing is not published; ours: a request waits at most for the step or batch under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.shared.cost_model.api import CostModel, DecodeBatch, PrefillChunk
from triptych.shared.cost_model.images import ImageShape

MAX_BATCH = 4096  # chosen: no engine batches more
MAX_STEP_TOKENS = 1 << 20  # chosen: far beyond any context


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of one request, in seconds."""

    ttft_s: float
    tbt_s: float


@dataclass(frozen=True, slots=True)
class TypicalRequest:
    """Pictures are as they are sent, all of one size. At least one text and one output token are needed."""

    num_text_tokens: int
    num_output_tokens: int
    num_images: int = 0
    image_width: int = 0
    image_height: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most that one instance does within the SLO. batch: images, or sequences; 0: not even one alone is in time.
    tokens_per_s: what ModServe counts as load: image tokens; of a text instance all tokens, for CroAttn text tokens."""

    batch: int
    tokens_per_s: float


NO_CAPACITY = Capacity(0, 0.0)


def prompt_of(model: CostModel, request: TypicalRequest) -> PrefillChunk:
    """The whole prompt as one chunk; image tokens are where the architecture counts them."""
    num_image_tokens = sum(image.num_tokens for image in images_of(model, request))
    if model.architecture == "DecOnly":
        return PrefillChunk(request.num_text_tokens + num_image_tokens)
    return PrefillChunk(request.num_text_tokens, num_image_tokens=num_image_tokens)


def images_of(model: CostModel, request: TypicalRequest) -> list[ImageShape]:
    """The pictures of one request, as the model sees them."""
    return [model.image(request.image_width, request.image_height)] * request.num_images


def isolated_slo(model: CostModel, request: TypicalRequest, factor: float) -> Slo:
    """`factor` times what the request takes alone on one instance: both papers set their SLO so, and don't publish theirs.
    Pictures are preprocessed side by side and encoded in one batch."""
    prompt = prompt_of(model, request)
    ttft_s = _vision_s(model, request) + model.prefill_s([prompt])
    return Slo(factor * ttft_s, factor * model.decode_s(_decode_batch(1, prompt)))


def tipping_point_tokens(model: CostModel) -> float:
    """Tokens in a prefill step at which computing takes as long as reading the weights: with fewer, a larger batch is nearly
    free; with more, its time grows with it (ElasticMM, arXiv 2507.10069)."""
    return model.prefill.knee_tokens


def max_encode_batch(model: CostModel, image: ImageShape, budget_s: float) -> int:
    """Most pictures that one batch encodes in budget_s; 0 when not even one."""
    return _largest(lambda n: model.encode_s([image] * n) <= budget_s, MAX_BATCH)


def max_prefill_tokens(model: CostModel, budget_s: float) -> int:
    """Most tokens of one prompt that a step prefills in budget_s; 0 when not even one."""
    return _largest(lambda n: model.prefill_s([PrefillChunk(n)]) <= budget_s, MAX_STEP_TOKENS)


def max_decode_batch(model: CostModel, prompt: PrefillChunk, tbt_s: float) -> int:
    """Most sequences with such a prompt that decode together within tbt_s and fit in the KV memory."""
    return _largest(lambda n: _fits_memory(model, n, prompt) and model.decode_s(_decode_batch(n, prompt)) <= tbt_s, MAX_BATCH)


def image_capacity(model: CostModel, request: TypicalRequest, slo: Slo) -> Capacity:
    """M_C of an image instance. A picture waits for the batch under way and is encoded in the next: two batches fit in what
    preprocess and prefill leave of the TTFT."""
    if not request.num_images:
        return NO_CAPACITY
    image = model.image(request.image_width, request.image_height)
    left_s = slo.ttft_s - _preprocess_s(model, request) - model.prefill_s([prompt_of(model, request)])
    batch = max_encode_batch(model, image, left_s / 2)
    return Capacity(batch, batch * image.num_tokens / model.encode_s([image] * batch)) if batch else NO_CAPACITY


def text_capacity(model: CostModel, request: TypicalRequest, slo: Slo) -> Capacity:
    """M_C of a text instance, which does prefill and decode. In the steady state a step makes one token for each of `batch`
    sequences and prefills as many prompt tokens as keep that going; a step fits in the TBT, and the steps of one prompt, the
    one under way included, in what the pictures leave of the TTFT."""
    prompt = prompt_of(model, request)
    left_s = slo.ttft_s - _vision_s(model, request)

    def step_tokens(batch: int) -> float:
        return batch * prompt.num_tokens / request.num_output_tokens

    def step_s(batch: int) -> float:
        return model.mixed_s(_chunks(model, prompt, step_tokens(batch)), _decode_batch(batch, prompt))

    def is_in_time(batch: int) -> bool:
        num_steps = max(1.0, prompt.num_tokens / step_tokens(batch))
        duration_s = step_s(batch)
        return duration_s <= slo.tbt_s and (num_steps + 1) * duration_s <= left_s

    in_memory = _largest(lambda n: _fits_memory(model, n, prompt), MAX_BATCH)
    batch = max((n for n in _batches(in_memory) if is_in_time(n)), key=lambda n: n / step_s(n), default=0)
    return Capacity(batch, (batch + step_tokens(batch)) / step_s(batch)) if batch else NO_CAPACITY


@dataclass(frozen=True, slots=True)
class Derived:
    """Everything at once, for one typical request. max_prefill_tokens: of a step that delays running outputs by no more
    than the TBT; max_decode_batch: sequences in one step."""

    slo: Slo
    tipping_point_tokens: float
    max_prefill_tokens: int
    max_decode_batch: int
    image: Capacity
    text: Capacity


def derive(model: CostModel, request: TypicalRequest, slo: Slo) -> Derived:
    """What `triptych profile` tells of a cost model."""
    return Derived(
        slo=slo,
        tipping_point_tokens=tipping_point_tokens(model),
        max_prefill_tokens=max_prefill_tokens(model, slo.tbt_s),
        max_decode_batch=max_decode_batch(model, prompt_of(model, request), slo.tbt_s),
        image=image_capacity(model, request, slo),
        text=text_capacity(model, request, slo),
    )


def choose_tp(models: Sequence[CostModel], capacity: Callable[[CostModel], Capacity]) -> CostModel | None:
    """Of the same model at several TP degrees the one with most throughput per GPU within the SLO, the smaller at a tie;
    None when none is in time. capacity: image_capacity or text_capacity of a request and an SLO."""
    rated = [(capacity(model).tokens_per_s / model.tp, -model.tp, model) for model in models]
    best = max(rated, key=lambda entry: entry[:2], default=None)
    return best[2] if best and best[0] > 0 else None


def _preprocess_s(model: CostModel, request: TypicalRequest) -> float:
    return model.preprocess_s(request.image_width, request.image_height) if request.num_images else 0.0


def _vision_s(model: CostModel, request: TypicalRequest) -> float:
    return _preprocess_s(model, request) + model.encode_s(images_of(model, request))


def _decode_batch(num_sequences: int, prompt: PrefillChunk) -> DecodeBatch:
    return DecodeBatch(num_sequences, num_sequences * prompt.num_tokens, num_sequences * prompt.num_image_tokens)


def _chunks(model: CostModel, prompt: PrefillChunk, step_tokens: float) -> list[PrefillChunk]:
    """step_tokens of such prompts, cut anywhere: each piece has half of what is left of its prompt before it on average.
    The KV of a prompt's images is spread over its tokens."""
    image_kv_tokens = model.image_kv_share * prompt.num_image_tokens
    num_tokens = step_tokens * (1 + image_kv_tokens / prompt.num_tokens)
    num_chunks = math.ceil(num_tokens / prompt.num_tokens)
    each = max(1, round(num_tokens / num_chunks))
    before = max(1, (prompt.num_tokens - each) // 2)
    return [PrefillChunk(each, before, prompt.num_image_tokens)] * num_chunks


def _fits_memory(model: CostModel, num_sequences: int, prompt: PrefillChunk) -> bool:
    each = model.kv_bytes(prompt.num_tokens, prompt.num_image_tokens)
    return num_sequences * each <= model.memory.kv_capacity_bytes


def _batches(most: int) -> list[int]:
    """Every size up to 32, then in steps of a sixteenth: a finer choice gains nothing."""
    sizes, size = [], 1
    while size <= most:
        sizes.append(size)
        size += max(1, size // 16)
    return sizes


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n <= limit that fits, when all smaller ones do."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
