"""The stages of text: prefill gets the prompt, decode the KV that prefill made. Used by attempt.py."""

from __future__ import annotations

from functools import partial

from triptych.services.router.dispatch import Work
from triptych.services.router.job import Job
from triptych.services.router.prompt import ExpandedPrompt
from triptych.services.router.stage_calls import StageCalls
from triptych.shared.messages import (
    MAX_INLINE_TOKENS,
    Accepted,
    DecodeRequest,
    Heartbeat,
    InstanceId,
    KvRef,
    PlacedImage,
    PrefillReply,
    PrefillRequest,
    PromptTokens,
    TensorRef,
)
from triptych.shared.policies.batching import num_blocks_for
from triptych.shared.policies.routing import choose_decode, choose_prefill, choose_preprocess
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.token_set import token_set
from triptych.shared.wire import MAX_PAYLOAD_BYTES

PLACED_IMAGE_BYTES = 512  # measured: up to 330 bytes on the wire with our ids
MESSAGE_SLACK_BYTES = 4096  # chosen: everything else of a PrefillRequest


async def prefill(
    calls: StageCalls, prompt: ExpandedPrompt, images: tuple[PlacedImage, ...], sampling: SamplingParams
) -> tuple[InstanceId, PrefillReply]:
    """Who did it, and the first token. Raises TriptychError."""
    tokens = await _prompt_tokens(calls, prompt, len(images))

    async def send(beat: Heartbeat) -> PrefillReply:
        request = PrefillRequest(calls.request_id, calls.parts.router_id, tokens, images, sampling, calls.remaining_s())
        return await calls.ask(beat, request, PrefillReply)

    return await calls.dispatch(Work("prefill", tokens.num_tokens, choose_prefill, send))


async def _prompt_tokens(calls: StageCalls, prompt: ExpandedPrompt, num_images: int) -> PromptTokens:
    """Inline, or left at a preprocess instance where the message would get too large."""
    content = prompt.to_bytes()
    num_bytes = len(content) + num_images * PLACED_IMAGE_BYTES + MESSAGE_SLACK_BYTES
    if len(prompt.token_ids) <= MAX_INLINE_TOKENS and num_bytes <= MAX_PAYLOAD_BYTES:
        return PromptTokens(len(prompt.token_ids), inline=content)

    async def send(beat: Heartbeat) -> TensorRef:
        return await calls.parts.uploader.blob(beat, calls.request_id, content, calls.remaining_s())

    _, leased = await calls.dispatch(Work("preprocess", 1, choose_preprocess, send))
    return PromptTokens(len(prompt.token_ids), leased=leased)


async def start_decode(
    calls: StageCalls, job: Job, kv: KvRef, first_token: int, prefill_id: InstanceId, sampling: SamplingParams
) -> InstanceId:
    """Hand over to a decode instance; tokens come on the request's stream from then on. Raises TriptychError."""
    num_prompt_tokens = calls.record.num_text_tokens + calls.record.num_image_tokens

    async def send(beat: Heartbeat) -> Accepted:
        calls.parts.streams.expect(calls.request_id, beat.instance_id)
        request = DecodeRequest(
            request_id=calls.request_id,
            router_id=calls.parts.router_id,
            kv=kv,
            first_token=first_token,
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling,
            timeout_s=calls.remaining_s(),
            prompt_token_set=token_set(job.prompt.token_ids) if sampling.repetition_penalty != 1 else b"",
            whole=job.is_whole,
        )
        return await calls.ask(beat, request, Accepted)

    num_blocks = num_blocks_for(num_prompt_tokens + 1, kv.block_size)
    choose = partial(choose_decode, num_blocks=num_blocks, prefill_id=prefill_id)
    decode_id, _ = await calls.dispatch(Work("decode", num_prompt_tokens, choose, send))
    return decode_id
