"""What a request has been through: its phase, its attempts, and a lifetime stamp per stage. Retry and traces read this.

Times are time.monotonic() of the router, passed in; a stage's own times come with its reply (StageTime). Pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from triptych.shared.messages import InstanceId, RequestId, StageTime

Stage = Literal["preprocess", "encoder", "prefill", "decode"]
PictureEnd = Literal["kv", "held", "encoded"]
PICTURE_ENDS: tuple[PictureEnd, ...] = ("kv", "held", "encoded")
STAGES: tuple[Stage, ...] = ("preprocess", "encoder", "prefill", "decode")


class Phase(Enum):
    """Where a request is. Its images are preprocessed and encoded side by side, so these two stages are one phase."""

    ARRIVING = "arriving"
    ADMITTED = "admitted"
    MEDIA = "media"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = {Phase.FINISHED, Phase.FAILED, Phase.CANCELLED}
_NEXT: dict[Phase, set[Phase]] = {
    Phase.ARRIVING: {Phase.ADMITTED},
    Phase.ADMITTED: {Phase.MEDIA},
    Phase.MEDIA: {Phase.PREFILL, Phase.MEDIA},  # MEDIA again: the next attempt
    Phase.PREFILL: {Phase.DECODE, Phase.FINISHED, Phase.MEDIA},
    Phase.DECODE: {Phase.FINISHED, Phase.MEDIA},
}


@dataclass(slots=True)
class StageStamp:
    """One stage of one attempt: queued here until an instance was chosen, begun when it was sent there, ended when the
    stage's result was there (or its failure)."""

    stage: Stage
    queued_at_s: float
    instance_id: InstanceId | None = None
    reason: str = ""
    begun_at_s: float | None = None
    ended_at_s: float | None = None
    time: StageTime | None = None

    def begin(self, instance_id: InstanceId, reason: str, now_s: float) -> None:
        self.instance_id, self.reason, self.begun_at_s = instance_id, reason, now_s

    def end(self, now_s: float, time: StageTime | None = None) -> None:
        self.ended_at_s, self.time = now_s, time


@dataclass(slots=True)
class Attempt:
    """One try. Its request id is its own, so that nothing of an earlier try can be mistaken for it. touched: every
    instance that may hold something for it, whether or not it answered."""

    request_id: RequestId
    stamps: list[StageStamp] = field(default_factory=list)
    touched: set[InstanceId] = field(default_factory=set)


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival to its end. base_id is unique; deadline_s is absolute. due_at_s: when its first token is
    due; None: there is no such target. pictures: how many, of all attempts, were left out since their KV is cached (kv), were
    held as embeddings (held), or encoded. num_stale: what the cache index told of and was not there."""

    base_id: str
    arrived_at_s: float
    deadline_s: float
    phase: Phase = Phase.ADMITTED
    due_at_s: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    num_images: int = 0
    num_text_tokens: int = 0
    num_image_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    pictures: Counter[PictureEnd] = field(default_factory=Counter)
    num_stale: int = 0
    first_token_at_s: float | None = None
    ended_at_s: float | None = None

    def sibling(self, index: int) -> RequestRecord:
        """Of another choice of the same request."""
        return RequestRecord(f"{self.base_id}-c{index}", self.arrived_at_s, self.deadline_s)

    def begin_attempt(self) -> Attempt:
        self.move(Phase.MEDIA)
        attempt = Attempt(RequestId(f"{self.base_id}-{len(self.attempts) + 1}"))
        self.attempts.append(attempt)
        return attempt

    def move(self, phase: Phase) -> None:
        """Go on to `phase`. Raises ValueError when that isn't a step that a request can take."""
        if phase not in _NEXT.get(self.phase, set()):
            raise ValueError(f"a request cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase

    def end(self, phase: Phase, now_s: float) -> bool:
        """Reach an end; False when it was reached before."""
        if self.phase in _ENDS:
            return False
        self.phase, self.ended_at_s = phase, now_s
        return True

    def remaining_s(self, now_s: float) -> float:
        return max(0.0, self.deadline_s - now_s)

    def slack_s(self, now_s: float) -> float | None:
        """Until the first token is due, at least 0. That is half-way to the deadline at the latest: who asks for later would be
        overtaken until it is too late."""
        if self.due_at_s is None:
            return None
        latest_s = (self.arrived_at_s + self.deadline_s) / 2
        return max(0.0, min(self.due_at_s, latest_s) - now_s)

    def stamps(self) -> list[StageStamp]:
        """The stages of the attempt that counted, in the order they began."""
        stamps = self.attempts[-1].stamps if self.attempts else []
        return [stamp for stamp in stamps if stamp.instance_id is not None]
