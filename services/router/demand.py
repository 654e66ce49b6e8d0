"""What this router is asked for, counted for its heartbeats: the scaler makes rates and SLO attainment of it. Counters only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from triptych.services.router.record import Phase, RequestRecord
from triptych.shared.instance_info import Demand


@dataclass(slots=True)
class _Counts:
    """As `Demand`."""

    num_requests: int = 0
    num_text_tokens: int = 0
    num_images: int = 0
    num_image_tokens: int = 0
    num_output_tokens: int = 0
    num_ended: int = 0
    num_in_time: int = 0


@dataclass(slots=True)
class DemandCounter:
    """Each choice of a request counts. slo_tbt_s: the target of the mean time between a request's tokens; 0: none."""

    slo_tbt_s: float = 0.0
    _counts: dict[str, _Counts] = field(default_factory=lambda: {"text": _Counts(), "multimodal": _Counts()})

    def on_arrival(self, record: RequestRecord, num_text_tokens: int) -> None:
        """Before the first attempt; record.num_images is known."""
        counts = self._of(record)
        counts.num_requests += 1
        counts.num_text_tokens += num_text_tokens
        counts.num_images += record.num_images

    def on_image_tokens(self, record: RequestRecord, num_image_tokens: int) -> None:
        """All pictures of an attempt are known. Those of an earlier one were counted."""
        if len(record.attempts) == 1:
            self._of(record).num_image_tokens += num_image_tokens

    def on_end(self, records: Sequence[RequestRecord]) -> None:
        """All choices of a request, which end with the first one. Those that never arrived don't count."""
        for record in records:
            if not record.attempts:
                continue
            counts = self._of(record)
            counts.num_output_tokens += record.num_output_tokens
            in_time = self._is_in_time(record, records[0])
            if in_time is not None:
                counts.num_ended += 1
                counts.num_in_time += in_time

    def snapshot(self) -> dict[str, Demand]:
        """By group, for a heartbeat."""
        return {group: Demand(**asdict(counts)) for group, counts in self._counts.items()}

    def _of(self, record: RequestRecord) -> _Counts:
        return self._counts["multimodal" if record.num_images else "text"]

    def _is_in_time(self, record: RequestRecord, first: RequestRecord) -> bool | None:
        """None: the client left before it could be told."""
        ended_at_s, first_token_at_s, due_at_s = first.ended_at_s or 0.0, record.first_token_at_s, record.due_at_s
        if first.phase is Phase.CANCELLED:
            is_late = first_token_at_s is None and due_at_s is not None and ended_at_s > due_at_s
            return False if is_late else None
        if first.phase is not Phase.FINISHED or first_token_at_s is None:
            return False
        if due_at_s is not None and first_token_at_s > due_at_s:
            return False
        num_gaps = record.num_output_tokens - 1
        return not self.slo_tbt_s or num_gaps < 1 or ended_at_s - first_token_at_s <= self.slo_tbt_s * num_gaps
