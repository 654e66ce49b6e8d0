"""What this router is asked for, counted for its heartbeats: the scaler makes rates and SLO attainment of it. Counters only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from triptych.services.router.record import Phase, RequestRecord
from triptych.shared.instance_info import Demand


@dataclass(slots=True)
class DemandCounter:
    """Each choice of a request counts. slo_tbt_s: the target of the mean time between a request's tokens; 0: none."""

    slo_tbt_s: float = 0.0
    _counts: dict[str, Demand] = field(default_factory=lambda: {"text": Demand(), "multimodal": Demand()})

    def on_arrival(self, record: RequestRecord, num_text_tokens: int) -> None:
        """Before the first attempt; record.num_images is known."""
        self._add(record, num_requests=1, num_text_tokens=num_text_tokens, num_images=record.num_images)

    def on_image_tokens(self, record: RequestRecord, num_image_tokens: int) -> None:
        """All pictures of an attempt are known. What the record has of an earlier one was counted."""
        self._add(record, num_image_tokens=num_image_tokens - record.num_image_tokens)

    def on_end(self, records: Sequence[RequestRecord]) -> None:
        """All choices of a request, which end with the first one. Those that never arrived don't count."""
        for record in records:
            if not record.attempts:
                continue
            self._add(record, num_output_tokens=record.num_output_tokens)
            in_time = self._is_in_time(record, records[0])
            if in_time is not None:
                self._add(record, num_ended=1, num_in_time=int(in_time))

    def snapshot(self) -> dict[str, Demand]:
        """By group, for a heartbeat."""
        return dict(self._counts)

    def _add(self, record: RequestRecord, **more: int) -> None:
        group = "multimodal" if record.num_images else "text"
        counts = self._counts[group]
        sums = {name: getattr(counts, name) + number for name, number in more.items()}
        self._counts[group] = msgspec.structs.replace(counts, **sums)

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
