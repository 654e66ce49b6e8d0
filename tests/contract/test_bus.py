"""The bus on a real NATS server: typed requests and errors, bounds, order of events, and life after the server's death."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import nats
import pytest

from support.own_server import OwnNats
from triptych.shared.bus import Bus, RequestHandler
from triptych.shared.errors import BadRequest, DeadlineExceeded, InstanceLost, InternalError, Overloaded, TriptychError
from triptych.shared.messages import (
    LOST_SUBJECT,
    Accepted,
    DrainRequest,
    Event,
    InstanceId,
    InstanceRequest,
    LaunchRequest,
    Lost,
    Message,
    ReleaseRequest,
    RequestId,
    StatusReply,
    StatusRequest,
    TokenBatch,
    TokenChunk,
    instance_subject,
    stream_subject,
)
from triptych.shared.wire import MAX_PAYLOAD_BYTES, decode_reply

SERVER = InstanceId("server-0")
TIMEOUT_S = 10.0

Connect = Callable[[], Awaitable[Bus]]


@pytest.fixture
async def own_nats(tmp_path: Path) -> AsyncIterator[OwnNats]:
    server = await OwnNats.start(tmp_path)
    yield server
    server.stop()


@pytest.fixture
async def connect(own_nats: OwnNats) -> AsyncIterator[Connect]:
    buses: list[Bus] = []

    async def make() -> Bus:
        buses.append(await Bus.connect(own_nats.url, f"test-{len(buses)}"))
        return buses[-1]

    yield make
    for bus in buses:
        await bus.close()


@pytest.fixture
async def client(connect: Connect) -> Bus:
    return await connect()


@pytest.fixture
async def server(connect: Connect) -> Bus:
    return await connect()


async def until(holds: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - counters tell no event
            await asyncio.sleep(0.01)


def answering(reply: Message) -> RequestHandler:
    async def handle(request: InstanceRequest) -> Message | None:
        return reply

    return handle


def raising(error: Exception) -> RequestHandler:
    async def handle(request: InstanceRequest) -> Message | None:
        raise error

    return handle


async def test_a_request_gets_its_reply(client: Bus, server: Bus) -> None:
    seen: list[InstanceRequest] = []

    async def handle(request: InstanceRequest) -> Message | None:
        seen.append(request)
        return StatusReply((), 7)

    await server.serve(SERVER, handle)
    assert await client.request(SERVER, LaunchRequest("x"), TIMEOUT_S) == StatusReply((), 7)
    assert seen == [LaunchRequest("x")]


async def test_each_of_many_concurrent_requests_gets_its_own_reply(client: Bus, server: Bus) -> None:
    async def handle(request: InstanceRequest) -> Message | None:
        assert isinstance(request, LaunchRequest)
        await asyncio.sleep(0.01 * (int(request.name) % 3))  # replies out of order
        return StatusReply((), int(request.name))

    await server.serve(SERVER, handle)
    replies = await asyncio.gather(*(client.request(SERVER, LaunchRequest(str(i)), TIMEOUT_S) for i in range(200)))
    assert replies == [StatusReply((), i) for i in range(200)]


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("no", code="some_code", status=413, param="messages"),
        Overloaded("later", code="full", status=429, retry_after_s=2.5),
        DeadlineExceeded("too late"),
        InstanceLost("gone"),
        InternalError("broken", code="bug"),
    ],
)
async def test_a_typed_error_comes_out_as_it_went_in(client: Bus, server: Bus, error: TriptychError) -> None:
    await server.serve(SERVER, raising(error))
    with pytest.raises(type(error)) as caught:
        await client.request(SERVER, StatusRequest(), TIMEOUT_S)
    assert type(caught.value) is type(error)
    assert caught.value.to_wire() == error.to_wire()


async def test_an_untyped_error_is_internal_and_tells_nothing(client: Bus, server: Bus) -> None:
    await server.serve(SERVER, raising(ValueError("secret /path")))
    with pytest.raises(InternalError) as caught:
        await client.request(SERVER, StatusRequest(), TIMEOUT_S)
    assert "secret" not in caught.value.message
    assert server.counters.num_handler_errors == 1


async def test_nobody_there_is_instance_lost_at_once(client: Bus) -> None:
    begin_s = asyncio.get_running_loop().time()
    with pytest.raises(InstanceLost) as caught:
        await client.request(InstanceId("nobody-0"), StatusRequest(), 60)
    assert caught.value.instance_id == "nobody-0"
    assert asyncio.get_running_loop().time() - begin_s < 5


async def test_no_answer_in_time_is_deadline_exceeded(client: Bus, server: Bus) -> None:
    async def handle(request: InstanceRequest) -> Message | None:
        await asyncio.Event().wait()
        return Accepted()

    await server.serve(SERVER, handle)
    with pytest.raises(DeadlineExceeded):
        await client.request(SERVER, StatusRequest(), 0.1)


async def test_an_oversized_request_is_never_sent(client: Bus, server: Bus) -> None:
    seen: list[InstanceRequest] = []

    async def handle(request: InstanceRequest) -> Message | None:
        seen.append(request)
        return Accepted()

    await server.serve(SERVER, handle)
    with pytest.raises(InternalError, match="LaunchRequest"):
        await client.request(SERVER, LaunchRequest("x" * MAX_PAYLOAD_BYTES), TIMEOUT_S)
    assert await client.request(SERVER, LaunchRequest("x" * (MAX_PAYLOAD_BYTES - 100)), TIMEOUT_S) == Accepted()
    assert len(seen) == 1


async def test_an_oversized_reply_is_an_error_not_silence(client: Bus, server: Bus) -> None:
    lost = tuple(TokenChunk(RequestId("r" * 1000), 0) for _ in range(100))
    await server.serve(SERVER, answering(TokenBatch(SERVER, lost)))
    with pytest.raises(InternalError, match="TokenBatch"):
        await client.request(SERVER, StatusRequest(), TIMEOUT_S)


async def test_garbage_is_answered_and_harmless(own_nats: OwnNats, client: Bus, server: Bus) -> None:
    await server.serve(SERVER, answering(Accepted()))
    raw = await nats.connect(own_nats.url)
    try:
        for payload in (b"", b"\xc1garbage", b"\x80", b"\x81\xa4type\xa7Unknown", b"x" * 70_000):
            answer = await raw.request(instance_subject(SERVER), payload, timeout=TIMEOUT_S)
            reply = decode_reply(answer.data)
            assert reply.error.kind == "internal", reply  # type: ignore[union-attr]
        await raw.publish(instance_subject(SERVER), b"nobody asks")
        await raw.flush()
    finally:
        await raw.close()
    assert await client.request(SERVER, StatusRequest(), TIMEOUT_S) == Accepted()
    assert server.counters.num_invalid_payloads == 6


async def test_over_the_bound_requests_are_refused_but_releases_get_through(client: Bus, server: Bus) -> None:
    go = asyncio.Event()
    released: list[RequestId] = []

    async def handle(request: InstanceRequest) -> Message | None:
        if isinstance(request, ReleaseRequest):
            released.append(request.request_id)
            return None
        await go.wait()
        return Accepted()

    await server.serve(SERVER, handle, max_concurrent=3)
    asking = [asyncio.create_task(client.request(SERVER, DrainRequest(), TIMEOUT_S)) for _ in range(5)]
    await until(lambda: server.counters.num_refused_requests == 2)
    await client.publish(SERVER, ReleaseRequest(RequestId("r")))
    await until(lambda: released == ["r"])
    go.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Accepted] * 3 + [Overloaded] * 2
    assert await client.request(SERVER, DrainRequest(), TIMEOUT_S) == Accepted(), "room again"


async def test_events_arrive_in_order_at_every_listener(connect: Connect, client: Bus, server: Bus) -> None:
    other = await connect()
    subject = stream_subject(SERVER)
    seen: tuple[list[Event], list[Event]] = ([], [])
    for bus, events in zip((client, other), seen, strict=True):
        await bus.listen(subject, events.append)
    sent = [TokenBatch(SERVER, (TokenChunk(RequestId("r"), seq, (seq,)),)) for seq in range(5000)]
    for event in sent:
        await server.publish_event(subject, event)
    await until(lambda: all(len(events) == len(sent) for events in seen))
    assert list(seen[0]) == list(seen[1]) == sent


async def test_an_event_handler_that_fails_or_gets_garbage_goes_on(own_nats: OwnNats, client: Bus, server: Bus) -> None:
    seen: list[Event] = []

    def handle(event: Event) -> None:
        seen.append(event)
        if len(seen) == 1:
            raise ValueError("once")

    await client.listen(LOST_SUBJECT, handle)
    raw = await nats.connect(own_nats.url)
    await raw.publish(LOST_SUBJECT, b"garbage")
    await raw.close()
    for code in range(2):
        await server.publish_event(LOST_SUBJECT, Lost(SERVER, "server", code, expected=False))
    await until(lambda: len(seen) == 2)
    assert client.counters.num_handler_errors == 1
    assert client.counters.num_invalid_payloads == 1


async def test_closing_tells_whoever_waits(client: Bus, server: Bus) -> None:
    begun = asyncio.Event()

    async def handle(request: InstanceRequest) -> Message | None:
        begun.set()
        await asyncio.Event().wait()
        return Accepted()

    await server.serve(SERVER, handle)
    asking = asyncio.create_task(client.request(SERVER, StatusRequest(), 60))
    await asyncio.wait_for(begun.wait(), TIMEOUT_S)
    await server.close()
    with pytest.raises(InstanceLost):
        await asyncio.wait_for(asking, TIMEOUT_S)
    with pytest.raises(InstanceLost):
        await client.request(SERVER, StatusRequest(), TIMEOUT_S)


async def test_a_lost_instance_fails_what_waits_for_it_and_nothing_else(client: Bus, server: Bus) -> None:
    begun: list[InstanceRequest] = []
    go = asyncio.Event()

    async def handle(request: InstanceRequest) -> Message | None:
        begun.append(request)
        await go.wait()
        return Accepted()

    other = InstanceId("server-1")
    await server.serve(SERVER, handle)
    await server.serve(other, handle)
    lost, kept = (asyncio.create_task(client.request(where, StatusRequest(), 60)) for where in (SERVER, other))
    await until(lambda: len(begun) == 2)
    client.note_lost(SERVER)
    with pytest.raises(InstanceLost) as caught:
        await asyncio.wait_for(lost, TIMEOUT_S)
    assert caught.value.instance_id == SERVER
    go.set()
    assert await asyncio.wait_for(kept, TIMEOUT_S) == Accepted()


async def test_after_close_nothing_is_sent_and_requests_fail_typed(client: Bus) -> None:
    await client.close()
    await client.close()
    await client.publish(SERVER, ReleaseRequest(RequestId("r")))
    assert client.counters.num_dropped_publishes == 1
    with pytest.raises(Overloaded):
        await client.request(SERVER, StatusRequest(), TIMEOUT_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_requests_and_events_work_again_after_a_server_restart(
    own_nats: OwnNats, client: Bus, server: Bus, number: signal.Signals
) -> None:
    back: list[str] = []
    client.on_reconnected(lambda: back.append("client"))
    server.on_reconnected(lambda: back.append("server"))
    events: list[Event] = []
    await client.listen(LOST_SUBJECT, events.append)
    await server.serve(SERVER, answering(Accepted()))
    own_nats.stop(number)
    await until(lambda: not client.is_connected and not server.is_connected)
    await own_nats.start_again()
    assert await client.request(SERVER, StatusRequest(), TIMEOUT_S) == Accepted()
    await until(lambda: sorted(back) == ["client", "server"])
    await server.publish_event(LOST_SUBJECT, Lost(SERVER, "server", 0, expected=True))
    await until(lambda: len(events) == 1)
    assert client.counters.num_disconnects == server.counters.num_disconnects == 1


async def test_a_request_whose_reply_was_lost_with_the_server_fails_soon(own_nats: OwnNats, client: Bus, server: Bus) -> None:
    """Its handler still runs, but its end may have been missed: waiting for the deadline would cost a minute."""
    begun = asyncio.Event()

    async def handle(request: InstanceRequest) -> Message | None:
        begun.set()
        await asyncio.Event().wait()
        return Accepted()

    await server.serve(SERVER, handle)
    asking = asyncio.create_task(client.request(SERVER, StatusRequest(), 60))
    await asyncio.wait_for(begun.wait(), TIMEOUT_S)
    own_nats.stop()
    await until(lambda: not client.is_connected)
    await own_nats.start_again()
    with pytest.raises(InstanceLost) as caught:
        await asyncio.wait_for(asking, TIMEOUT_S)
    assert caught.value.code == "bus_lost"


async def test_every_listener_survives_a_connection_that_closed_for_good(own_nats: OwnNats, client: Bus, server: Bus) -> None:
    """nats-py gives up where the server says -ERR: a new client must take up all that the old one did."""
    first: list[Event] = []
    second: list[Event] = []
    late: list[Event] = []
    for seen in (first, second):
        await client.listen(LOST_SUBJECT, seen.append)
    await client.serve(SERVER, answering(Accepted()))
    own_nats.stop()
    await until(lambda: not client.is_connected)
    await client._link._client.close()
    await client.listen(stream_subject(SERVER), late.append)
    await own_nats.start_again()
    await until(lambda: client.is_connected and server.is_connected)
    assert await server.request(SERVER, StatusRequest(), TIMEOUT_S) == Accepted()
    await server.publish_event(LOST_SUBJECT, Lost(SERVER, "server", 0, expected=True))
    await server.publish_event(stream_subject(SERVER), TokenBatch(SERVER, ()))
    await until(lambda: (len(first), len(second), len(late)) == (1, 1, 1))
    with pytest.raises(InstanceLost):
        await client.request(InstanceId("nobody-0"), StatusRequest(), TIMEOUT_S)


async def test_one_listener_that_fails_does_not_keep_the_event_from_the_next(client: Bus, server: Bus) -> None:
    seen: list[Event] = []

    def fail(event: Event) -> None:
        raise ValueError("bug")

    for handler in (fail, seen.append):
        await client.listen(LOST_SUBJECT, handler)
    await server.publish_event(LOST_SUBJECT, Lost(SERVER, "server", 0, expected=True))
    await until(lambda: len(seen) == 1)
    assert client.counters.num_handler_errors == 1


@pytest.mark.parametrize("url", ["nats://h:port", "nats://"])
async def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(BadRequest, match="TRIPTYCH_NATS_URL"):
        await asyncio.wait_for(Bus.connect(url, "test"), TIMEOUT_S)


@pytest.mark.parametrize("url", ["nats://secret@127.0.0.1:1", "secret@127.0.0.1:1"])
async def test_connecting_to_nobody_ends_with_a_clear_error(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr("triptych.shared.nats_link.CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(Overloaded, match=r"127\.0\.0\.1:1 .*TRIPTYCH_NATS_URL") as caught:
        await Bus.connect(url, "test")
    assert "secret" not in caught.value.message


async def test_a_slow_listener_drops_are_counted(monkeypatch: pytest.MonkeyPatch, connect: Connect, server: Bus) -> None:
    monkeypatch.setattr("triptych.shared.nats_link.PENDING_BYTES", 1000)
    slow = await connect()
    seen = itertools.count()
    await slow.listen(LOST_SUBJECT, lambda _: (next(seen), None)[1])
    for _ in range(2000):  # one read of the socket brings more than the bound before the handler runs
        await server.publish_event(LOST_SUBJECT, Lost(SERVER, "x" * 100, 0, expected=True))
    await until(lambda: slow.counters.num_slow_consumer_drops > 0)
