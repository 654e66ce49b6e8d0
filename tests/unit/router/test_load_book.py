"""How loaded instances look to the router: heartbeats, and dispatches that they don't tell of yet."""

from __future__ import annotations

import msgspec

from triptych.services.router.load_book import InstanceView, LoadBook
from triptych.shared.instance_info import ModelCard, Resources, StageLoad
from triptych.shared.messages import Heartbeat, InstanceId, Lost
from triptych.shared.registry import Registry

A = InstanceId("encoder-0-a")


def beat(num_pending_tokens: int = 0, revision: str = "rev", num_waiting: int = 0) -> Heartbeat:
    return Heartbeat(
        instance_id=A,
        name="encoder-0",
        service="instance",
        state="ready",
        roles=("encoder", "decode"),
        http_url="",
        interval_s=0.5,
        host="here",
        loads=(StageLoad("encoder", num_waiting=num_waiting, num_pending_tokens=num_pending_tokens),),
        resources=Resources(pid=1, num_threads=1, num_free_blocks=10, num_cached_blocks=5),
        model=ModelCard("m", revision, 100),
    )


def book_of(registry: Registry) -> LoadBook:
    book = LoadBook(registry, "rev", block_size=16)
    registry.on_lost(book.on_lost)
    return book


def test_a_heartbeat_alone() -> None:
    registry = Registry(3.0)
    registry.on_event(beat(num_pending_tokens=70, num_waiting=2), 0.0)
    assert book_of(registry).views("encoder") == [InstanceView(A, 2, 70, 15, 0.0, 0.0, has_images=True, decodes=True)]
    assert book_of(registry).views("prefill") == []


def test_dispatches_since_the_heartbeat_count_on_top_and_fade_into_the_next() -> None:
    registry = Registry(3.0)
    registry.on_event(beat(num_pending_tokens=70), 0.0)
    book = book_of(registry)
    with book.hold(A, "encoder", 100):
        assert book.views("encoder")[0].num_pending_tokens == 170
        registry.on_event(beat(num_pending_tokens=165), 0.5)  # tells of ours already
        assert book.views("encoder")[0].num_pending_tokens == 165
        registry.on_event(beat(num_pending_tokens=0), 1.0)  # taken before ours arrived there
        assert book.views("encoder")[0].num_pending_tokens == 100
        with book.hold(A, "encoder", 7):
            assert book.views("encoder")[0].num_requests == 2
    assert len(book) == 0


def test_work_done_since_the_heartbeat_is_taken_off() -> None:
    registry = Registry(3.0)
    book = book_of(registry)
    registry.on_event(beat(), 0.0)
    with book.hold(A, "encoder", 1):
        with book.hold(A, "encoder", 100):
            registry.on_event(beat(num_pending_tokens=120), 0.5)
            assert book.views("encoder")[0].num_pending_tokens == 120
        assert book.views("encoder")[0].num_pending_tokens == 20


def test_blocks_of_what_was_dispatched() -> None:
    registry = Registry(3.0)
    registry.on_event(beat(), 0.0)
    book = book_of(registry)
    with book.hold(A, "decode", 40):
        assert book.views("decode")[0].num_free_blocks == 13


def test_the_engine_is_shared_with_other_stages() -> None:
    registry = Registry(3.0)
    loads = (
        StageLoad("encoder", num_pending_tokens=70, tokens_per_s=100.0),
        StageLoad("decode", num_pending_tokens=9, tokens_per_s=1.0),
    )
    registry.on_event(msgspec.structs.replace(beat(), loads=(*loads, StageLoad("prefill"))), 0.0)
    book = book_of(registry)
    with book.hold(A, "encoder", 30):
        [encoder], [decode] = book.views("encoder"), book.views("decode")
    assert (encoder.tokens_per_s, encoder.other_s) == (100.0, 0.0), "decoding is no work that is yet to do"
    assert (decode.tokens_per_s, decode.other_s) == (1.0, 1.0)


def test_whether_an_instance_has_images_to_encode() -> None:
    registry = Registry(3.0)
    registry.on_event(beat(), 0.0)
    book = book_of(registry)
    assert not book.views("decode")[0].has_images
    with book.hold(A, "encoder", 30):
        assert book.views("decode")[0].has_images, "of which no heartbeat tells yet"
    assert not book.views("decode")[0].has_images
    registry.on_event(beat(num_pending_tokens=9), 0.5)
    assert book.views("decode")[0].has_images


def test_suspects_are_left_out_until_they_beat_again() -> None:
    registry = Registry(3.0)
    registry.on_event(beat(), 0.0)
    book = book_of(registry)
    book.suspect(A)
    assert book.views("encoder") == []
    registry.on_event(beat(), 0.5)
    assert len(book.views("encoder")) == 1
    book.suspect(A)
    registry.on_event(Lost(A, "encoder-0", 1, expected=False), 0.6)
    assert book.views("encoder") == []
    assert not book._suspects


def test_refusals_and_other_models_are_left_out() -> None:
    registry = Registry(3.0)
    registry.on_event(beat(), 0.0)
    book = book_of(registry)
    assert book.views("encoder", leave_out=[A]) == []
    registry.on_event(beat(revision="other"), 0.5)
    assert book.views("encoder") == []


def test_hosts_are_those_that_take_follow_ups_or_all_prompts() -> None:
    registry = Registry(3.0)
    book = book_of(registry)
    host = msgspec.structs.replace(
        beat(),
        roles=("decode",),
        takes_follow_ups=True,
        loads=(StageLoad("prefill", num_pending_tokens=40, tokens_per_s=10.0),),
    )
    assert book.hosts([A]) == []
    for other in (beat(), msgspec.structs.replace(host, state="draining")):
        registry.on_event(other, 0.0)
        assert book.hosts([A]) == []
    registry.on_event(msgspec.structs.replace(host, roles=("prefill", "decode"), takes_follow_ups=False), 0.0)
    assert [view.instance_id for view in book.hosts([A])] == [A]
    registry.on_event(host, 0.0)
    assert book.views("prefill") == []
    with book.hold(A, "prefill", 9):
        [view] = book.hosts([A])
    assert (view.num_pending_tokens, view.num_requests, view.tokens_per_s) == (49, 1, 0.0), "its pace is of short prompts"
    book.suspect(A)
    assert book.hosts([A]) == []
