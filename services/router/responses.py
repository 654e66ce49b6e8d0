"""The bodies of OpenAI's chat API: one JSON object, or chunks of a stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triptych.services.router.record import RequestRecord
from triptych.shared.messages import FinishReason, StageTime


@dataclass(frozen=True, slots=True)
class Header:
    """What every object of one answer repeats. created: Unix seconds."""

    completion_id: str
    created: int
    model: str

    def as_dict(self, kind: str) -> dict[str, Any]:
        return {"id": self.completion_id, "object": kind, "created": self.created, "model": self.model}


def completion(header: Header, text: str, finish_reason: FinishReason, record: RequestRecord) -> dict[str, Any]:
    """The whole answer."""
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return {**header.as_dict("chat.completion"), "choices": [choice], "usage": usage(record)}


def chunk(header: Header, delta: dict[str, str], finish_reason: FinishReason | None, with_usage: bool) -> dict[str, Any]:
    """One piece of a stream. with_usage: the stream will end with its usage, so every other chunk says null."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    body = {**header.as_dict("chat.completion.chunk"), "choices": [choice]}
    return {**body, "usage": None} if with_usage else body


def usage_chunk(header: Header, record: RequestRecord) -> dict[str, Any]:
    """The chunk before [DONE] when the client asked for usage."""
    return {**header.as_dict("chat.completion.chunk"), "choices": [], "usage": usage(record)}


def usage(record: RequestRecord) -> dict[str, Any]:
    """Tokens counted as the model saw them, images expanded."""
    num_prompt = record.num_text_tokens + record.num_image_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": record.num_output_tokens,
        "total_tokens": num_prompt + record.num_output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "text_tokens": record.num_text_tokens,
            "image_tokens": record.num_image_tokens,
        },
    }


def trace(record: RequestRecord) -> dict[str, Any]:
    """The request's way through the stages (of the attempt that counted), for X-Triptych-Trace."""
    return {"attempts": len(record.attempts), "stages": _stages(record.stage_times())}


def _stages(times: Sequence[StageTime]) -> list[dict[str, Any]]:
    return [
        {
            "stage": time.stage,
            "instance_id": time.instance_id,
            "queued_ms": round(time.queued_s * 1000, 3),
            "transfer_ms": round(time.transfer_s * 1000, 3),
            "compute_ms": round(time.compute_s * 1000, 3),
        }
        for time in times
    ]
