"""One request from admission to release: attempts until the output is out, each let go of at its end, whatever the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from triptych.services.router.attempt import AttemptRun
from triptych.services.router.job import MAX_GIVEN_UP, Job, Parts
from triptych.services.router.media_gate import STORE_FULL
from triptych.services.router.record import RequestRecord
from triptych.services.router.routing import Routes
from triptych.services.router.stage_calls import StageCalls
from triptych.services.router.token_streams import Tokens
from triptych.shared.errors import CACHE_MISS, GIVEN_UP, InstanceLost, InternalError, Overloaded, TriptychError
from triptych.shared.policies.groups import group_of_request

_log = structlog.get_logger(__name__)


async def run_request(parts: Parts, job: Job, record: RequestRecord) -> AsyncGenerator[Tokens]:
    """The output in pieces, the last with finish_reason. Close the iterator (aclosing) to abort.

    A lost instance means another attempt, which goes on after the tokens that are out: they are a part of its prompt, whose KV
    may be cached. Once a stream has begun the files of its pictures are let go of: then it can only go on where they, or their
    KV, are cached. An attempt that found no room is repeated until the request's deadline, which the gate watches. One that the
    cache index misled is repeated without asking it, and one that ended with its instance's role is nobody's failure.

    Raises:
        TriptychError: the request ends in this error.
    """
    if (slo_ttft_s := parts.limits.slo_ttft_s(job)) is not None:
        record.due_at_s = record.arrived_at_s + slo_ttft_s
    record.num_images = len(job.sources)
    parts.demand.on_arrival(record, job.prompt.num_text_tokens)
    output: list[int] = []
    num_failed, num_given_up, trusts_index = 0, 0, True
    while True:
        attempt = record.begin_attempt()
        try:
            calls = StageCalls(parts, record, attempt, Routes(parts.routing, group_of_request(record.num_images)), job.terms)
            async with aclosing(AttemptRun(calls, job, output, trusts_index).tokens()) as pieces:
                async for piece in pieces:
                    yield piece
            return
        except InstanceLost as error:
            _raise_if_cancelled()
            _log.info("an attempt failed", request_id=attempt.request_id, code=error.code, instance_id=error.instance_id)
            is_misled = error.code == CACHE_MISS and trusts_index
            num_failed += error.code not in (STORE_FULL, GIVEN_UP) and not is_misled
            num_given_up += error.code == GIVEN_UP
            record.num_stale += is_misled
            trusts_index = trusts_index and not is_misled
            if num_failed >= parts.limits.max_attempts or num_given_up >= MAX_GIVEN_UP:
                raise _given_up(parts, record) from error
        finally:
            parts.release(attempt.request_id, attempt.touched)


def _raise_if_cancelled() -> None:
    """A task group that is cancelled while something in it fails raises the failure alone (Python 3.11, 3.12): the client that
    left must not get another attempt."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _given_up(parts: Parts, record: RequestRecord) -> TriptychError:
    """A request on each of whose attempts an instance ended may be what kills them: neither we nor the client try it again.
    Where instances were only silent, or lost what they held (a lease ended, a store was full in between), later is better."""
    if all(any(map(parts.dispatcher.has_ended, attempt.touched)) for attempt in record.attempts):
        return InternalError("the request failed on every attempt")
    return Overloaded("what was held for the request got lost on every attempt; try again later")
