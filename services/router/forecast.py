"""What a router expects of one attempt, for the policies: what prefill has to do, where, and when pictures will be encoded."""

from __future__ import annotations

import time

import structlog

from triptych.services.router.cached_parts import CachedParts
from triptych.services.router.pictures import Pictures
from triptych.services.router.prompt import ExpandedPrompt, Prompt
from triptych.services.router.stage_calls import StageCalls
from triptych.shared.errors import Overloaded
from triptych.shared.messages import InstanceId
from triptych.shared.policies.admission import StageWork, admit
from triptych.shared.policies.batching import num_blocks_for
from triptych.shared.policies.overlap import OverlapView, PendingImage, Verdict
from triptych.shared.policies.pace import Pace
from triptych.shared.policies.routing import PromptWork

NOTHING_TO_OVERLAP = Verdict(False, "there is nothing to wait for, or nobody to compute meanwhile")

_log = structlog.get_logger(__name__)


def prompt_work(calls: StageCalls, prompt: Prompt, pictures: Pictures, cached: CachedParts) -> PromptWork:
    """What prefill has to do, as far as the pictures are known."""
    cache, num_image_tokens = calls.parts.cache, pictures.num_tokens
    return PromptWork(
        num_tokens=prompt.num_text_tokens + (0 if cache.attends_to_all else num_image_tokens),
        num_blocks=num_blocks_for(prompt.num_text_tokens + num_image_tokens, cache.block_size),
        prefixes=cached.computed_prefixes(),
        kv_costs=calls.parts.transfers.kv,
        saved_s=pictures.saved_s(),
    )


def probable_prefill(calls: StageCalls, work: PromptWork) -> InstanceId | None:
    """Where the prompt would go now; None when no instance there could encode as well, so that it makes no difference."""
    if calls.routes.is_coupled or not calls.parts.book.some_encode_and_prefill:
        return None
    choice = calls.routes.prefill(work)(calls.routes.views("prefill"))
    return choice.instance_id if choice is not None else None


def overlap_verdict(calls: StageCalls, prompt: ExpandedPrompt, pictures: Pictures, cached: CachedParts) -> Verdict:
    """Whether the prompt goes to prefill before its missing pictures are encoded. All are known."""
    parts, now_s = calls.parts, time.monotonic()
    missing = pictures.missing
    if not missing or not (candidates := calls.routes.views("prefill")):
        return NOTHING_TO_OVERLAP
    pace, num_cached = Pace.of(candidates), cached.num_cached
    likely = min(candidates, key=pace.wait_s)
    decoding = [one.num_requests for one in parts.book.views("decode") if one.instance_id == likely.instance_id]
    view = OverlapView(
        num_tokens=len(prompt.token_ids) - num_cached,
        tokens_per_s=pace.tokens_per_s,
        wait_s=pace.wait_s(likely),
        images=[
            PendingImage(
                offset=max(0, prompt.offsets[picture.index] + shard.offset - num_cached),
                ready_s=max(0.0, (shard.due_at_s or now_s) - now_s),
            )
            for picture, shard in missing
        ],
        num_others=likely.num_requests + sum(decoding),
        attends_to_all=parts.cache.attends_to_all,
    )
    verdict = parts.routing.policies.overlap(view)
    _log.debug("overlap", is_yes=verdict.is_yes, reason=verdict.reason, request_id=calls.request_id)
    return verdict


def refuse_if_late(calls: StageCalls, prompt: Prompt, pictures: Pictures, cached: CachedParts) -> None:
    """Before the first attempt begins: what waits already may be too much for the request's target. Raises Overloaded."""
    target_s = calls.slack_s()
    if target_s is None or len(calls.record.attempts) > 1:
        return
    work = prompt_work(calls, prompt, pictures, cached)
    num_cached = max(work.prefixes.values(), default=0)
    able = [*calls.routes.views("prefill"), *calls.routes.hosts(work).able]
    stages = [StageWork(able, work.num_tokens - num_cached)]
    if pictures.need_room:
        stages.append(StageWork(calls.routes.views("encoder"), pictures.num_needed_tokens))
    admission = admit(stages, target_s, calls.parts.limits.longest_slo_ttft_s)
    _log.debug("admission", reason=admission.reason, request_id=calls.request_id)
    if admission.retry_after_s is not None:
        raise Overloaded(
            "the first token would come too late for the request's target; try again later",
            code="slo",
            retry_after_s=admission.retry_after_s,
        )
