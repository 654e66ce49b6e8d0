"""What a router counts for the scaler: by group, once for each request, in time or not."""

from __future__ import annotations

import pytest

from triptych.services.router.demand import DemandCounter
from triptych.services.router.record import Phase, RequestRecord
from triptych.shared.instance_info import Demand


def arrived(counter: DemandCounter, num_images: int = 0, due_at_s: float | None = None) -> RequestRecord:
    record = RequestRecord("r", arrived_at_s=10.0, deadline_s=100.0, due_at_s=due_at_s, num_images=num_images)
    counter.on_arrival(record, 7)
    record.begin_attempt()
    return record


def ended(
    record: RequestRecord, phase: Phase, at_s: float, first_token_at_s: float | None, num_tokens: int = 1
) -> RequestRecord:
    record.first_token_at_s, record.num_output_tokens = first_token_at_s, num_tokens
    record.end(phase, at_s)
    return record


def test_groups_are_counted_apart_and_images_before_their_tokens_are_known() -> None:
    counter = DemandCounter()
    arrived(counter)
    record = arrived(counter, num_images=2)
    assert counter.snapshot() == {"text": Demand(1, 7), "multimodal": Demand(1, 7, 2)}
    record.begin_attempt()  # the first one ended before all of its pictures were known
    counter.on_image_tokens(record, 30)
    record.num_image_tokens = 30
    record.begin_attempt()
    counter.on_image_tokens(record, 30)
    assert counter.snapshot()["multimodal"].num_image_tokens == 30, "another attempt is no other demand"
    counter.on_end([ended(record, Phase.FINISHED, 20.0, 12.0, 5)])
    assert counter.snapshot()["multimodal"] == Demand(1, 7, 2, 30, 5, 1, 1)


@pytest.mark.parametrize(
    ("phase", "first_token_at_s", "num_tokens", "counted"),
    [
        (Phase.FINISHED, 12.0, 1, (1, 1)),
        (Phase.FINISHED, 12.5, 1, (1, 0)),  # its first token came late
        (Phase.FINISHED, 12.0, 9, (1, 1)),  # 8 s for 8 gaps
        (Phase.FINISHED, 12.0, 8, (1, 0)),  # 8 s for 7 gaps of 1 s
        (Phase.FAILED, None, 0, (1, 0)),
        (Phase.CANCELLED, 11.0, 3, (0, 0)),  # it was answered in time when the client left
        (Phase.CANCELLED, None, 0, (1, 0)),  # the client waited in vain
    ],
)
def test_in_time_means_first_token_and_pace(
    phase: Phase, first_token_at_s: float | None, num_tokens: int, counted: tuple[int, int]
) -> None:
    counter = DemandCounter(slo_tbt_s=1.0)
    record = arrived(counter, due_at_s=12.0)
    counter.on_end([ended(record, phase, 20.0, first_token_at_s, num_tokens)])
    found = counter.snapshot()["text"]
    assert (found.num_ended, found.num_in_time) == counted


def test_a_client_that_leaves_early_says_nothing_about_us() -> None:
    counter = DemandCounter()
    counter.on_end([ended(arrived(counter, due_at_s=12.0), Phase.CANCELLED, 11.0, None)])
    assert counter.snapshot()["text"].num_ended == 0


def test_each_choice_counts_and_one_that_never_arrived_does_not() -> None:
    counter = DemandCounter()
    first = arrived(counter)
    second = first.sibling(1)
    counter.on_arrival(second, 7)
    second.begin_attempt()
    second.first_token_at_s, second.num_output_tokens = 11.0, 4
    counter.on_end([ended(first, Phase.FINISHED, 20.0, 11.0, 5), second])
    counter.on_end([ended(RequestRecord("bad", 10.0, 100.0), Phase.FAILED, 11.0, None)])
    assert counter.snapshot()["text"] == Demand(2, 14, num_output_tokens=9, num_ended=2, num_in_time=2)
