"""The control plane on NATS: typed requests to one instance, events to whoever listens. See messages.py for what travels.

The connection is kept up for ever: NATS may restart under a running process. Requests that were in flight when it broke
fail as InstanceLost soon after, because their replies may be lost. Connecting and reconnecting is in nats_link.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg

from triptych.shared.errors import (
    UNREACHABLE,
    DeadlineExceeded,
    InstanceLost,
    InternalError,
    Overloaded,
    TriptychError,
    from_wire,
)
from triptych.shared.messages import ErrorReply, Event, InstanceId, InstanceRequest, Message, Reply, instance_subject
from triptych.shared.nats_link import BusCounters, NatsLink
from triptych.shared.wire import decode_event, decode_reply, decode_request, encode, error_reply

RequestHandler = Callable[[InstanceRequest], Awaitable[Message | None]]
"""Answers a request with its reply; None for messages that are only published (ReleaseRequest, PullDone)."""
EventHandler = Callable[[Event], None]

NO_RESPONDERS = "503"  # NATS's status header of "nobody is subscribed there"
RECONNECT_GRACE_S = 2.0  # chosen: peers resubscribe within their own reconnect wait (at most 0.5 s)
RETRY_WAIT_S = 0.1  # chosen: pause before a request is sent again inside the grace time
UNANSWERED_FACTOR = 4  # chosen: published messages (releases) get room for this many times the bound of requests

_log = structlog.get_logger(__name__)


class _NobodyThereError(Exception):
    """NATS says that nobody is subscribed to the request's subject."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A request that waits for its reply."""

    instance_id: InstanceId
    reply: asyncio.Future[bytes]


class Bus:
    """One NATS connection. Every handler of a request runs as its own task, at most max_concurrent of them; more are
    answered Overloaded. A handler's TriptychError becomes an ErrorReply; any other exception an InternalError, logged once."""

    def __init__(self, link: NatsLink) -> None:
        self._link = link
        self._inbox = link.new_inbox()
        self._tokens = itertools.count()
        self._in_flight: dict[str, _InFlight] = {}
        self._served: dict[str, set[asyncio.Task[None]]] = {}  # by subject, the handlers that run
        self._listeners: dict[str, list[EventHandler]] = {}
        self._grace_until_s = 0.0
        link.on_reconnected(self._on_reconnected)

    @classmethod
    async def connect(cls, url: str, name: str) -> Bus:
        """Retries for a while (the server may still be starting). error_cb is set and counted.

        Raises:
            Overloaded: no server answers at url.
        """
        link = await NatsLink.connect(url, name)
        bus = cls(link)
        await link.subscribe(f"{bus._inbox}.*", bus._on_reply)
        return bus

    @property
    def is_connected(self) -> bool:
        return self._link.is_connected

    @property
    def counters(self) -> BusCounters:
        return self._link.counters

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        """callback runs on the loop each time the connection is back."""
        self._link.on_reconnected(callback)

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Reply:
        """Raises InstanceLost when nobody answers there (NoResponders), DeadlineExceeded after timeout_s, or the typed
        error that was answered. Is `ControlPlane.request` of the transport."""
        payload = encode(message)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._ask_until_there(instance_id, payload)
        except TimeoutError:
            raise DeadlineExceeded() from None
        if isinstance(reply, ErrorReply):
            raise from_wire(reply.error)
        return reply

    async def _ask_until_there(self, instance_id: InstanceId, payload: bytes) -> Reply:
        """Just after a reconnect the peer may not have subscribed again yet: nobody there is then no sign of death."""
        while True:
            try:
                return await self._ask(instance_id, payload)
            except _NobodyThereError:
                if asyncio.get_running_loop().time() >= self._grace_until_s:
                    raise InstanceLost("an instance of a stage is gone", instance_id=instance_id, code=UNREACHABLE) from None
                await asyncio.sleep(RETRY_WAIT_S)

    async def _ask(self, instance_id: InstanceId, payload: bytes) -> Reply:
        token = str(next(self._tokens))
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._in_flight[token] = _InFlight(instance_id, future)
        try:
            try:
                await self._link.publish(instance_subject(instance_id), payload, reply=f"{self._inbox}.{token}")
            except nats.errors.Error as error:
                raise Overloaded("the message bus is unreachable", code="bus_unavailable") from error
            return decode_reply(await future)
        except msgspec.MsgspecError as error:
            self.counters.num_invalid_payloads += 1
            raise InternalError("a stage answered with an unreadable message") from error
        finally:
            self._in_flight.pop(token, None)

    async def _on_reply(self, message: Msg) -> None:
        waiting = self._in_flight.get(message.subject.rpartition(".")[2])
        if waiting is None or waiting.reply.done():
            return  # the asker gave up
        if message.headers and message.headers.get("Status") == NO_RESPONDERS:
            waiting.reply.set_exception(_NobodyThereError())
        else:
            waiting.reply.set_result(message.data)

    def _on_reconnected(self) -> None:
        """Replies to what is in flight may be lost: give those on their way a moment, then fail the rest."""
        loop = asyncio.get_running_loop()
        self._grace_until_s = loop.time() + RECONNECT_GRACE_S
        error = InstanceLost("the message bus was restarted", code="bus_lost")
        loop.call_later(RECONNECT_GRACE_S, _fail, tuple(self._in_flight.values()), error)

    def note_lost(self, instance_id: InstanceId) -> None:
        """An instance is gone: whoever waits for its reply learns now. (What NATS handed to a dying process is lost without
        a word.)"""
        waiting = [one for one in self._in_flight.values() if one.instance_id == instance_id]
        _fail(waiting, InstanceLost("an instance of a stage was lost", instance_id=instance_id))

    async def publish(self, instance_id: InstanceId, message: Message) -> None:
        """To one instance, unanswered. Never fails for the bus's sake: what can't be sent is dropped and counted."""
        await self._send(instance_subject(instance_id), encode(message))

    async def publish_event(self, subject: str, event: Event) -> None:
        """To whoever listens, unanswered. What can't be sent is dropped and counted."""
        await self._send(subject, encode(event))

    async def _send(self, subject: str, payload: bytes) -> None:
        try:
            await self._link.publish(subject, payload)
        except nats.errors.Error as error:  # closed, or its buffer of a broken connection is full
            self.counters.num_dropped_publishes += 1
            _log.debug("publish dropped", subject=subject, error=type(error).__name__)

    async def serve(self, instance_id: InstanceId, handler: RequestHandler, max_concurrent: int = 4096) -> None:
        """Take InstanceRequests at instance_subject(instance_id)."""
        subject = instance_subject(instance_id)
        running: set[asyncio.Task[None]] = set()

        async def on_message(message: Msg) -> None:
            try:
                request = decode_request(message.data)
            except msgspec.MsgspecError:
                self.counters.num_invalid_payloads += 1
                await self._answer(message, error_reply(InternalError("not a valid request message", code="invalid_message")))
                return
            # A release must get through when requests no longer do, or what would make room waits for its lease to end.
            bound = max_concurrent if message.reply else max_concurrent * UNANSWERED_FACTOR
            if len(running) >= bound:
                self.counters.num_refused_requests += 1
                await self._answer(message, error_reply(Overloaded("too many requests at one instance")))
                return
            task = asyncio.create_task(self._handle(message, request, handler), name=type(request).__name__)
            running.add(task)
            task.add_done_callback(running.discard)

        self._served[subject] = running
        await self._link.subscribe(subject, on_message)

    async def stop_serving(self, instance_id: InstanceId) -> None:
        """Intake ends, running handlers are cancelled and their askers told. Idempotent."""
        await self._stop_serving(instance_subject(instance_id))

    async def _stop_serving(self, *subjects: str) -> None:
        for subject in subjects:
            await self._link.unsubscribe(subject)
        handlers = [task for subject in subjects for task in self._served.pop(subject, ())]
        for task in handlers:
            task.cancel()
        if handlers:
            await asyncio.wait(handlers, timeout=RECONNECT_GRACE_S)

    async def _handle(self, message: Msg, request: InstanceRequest, handler: RequestHandler) -> None:
        try:
            reply = await handler(request)
            payload = encode(reply) if reply is not None else b""
        except TriptychError as error:
            payload = encode(error_reply(error))
        except asyncio.CancelledError:
            # Whoever still waits learns at once, not at its deadline.
            await self._answer(message, error_reply(InstanceLost("the request was stopped at one instance", code="cancelled")))
            raise
        except Exception:
            self.counters.num_handler_errors += 1
            _log.exception("request handler failed", message=type(request).__name__)
            payload = encode(error_reply(InternalError()))
        if message.reply and payload:
            await self._send(message.reply, payload)

    async def _answer(self, message: Msg, reply: ErrorReply) -> None:
        if message.reply:
            await self._send(message.reply, encode(reply))

    async def listen(self, subject: str, handler: EventHandler) -> None:
        """Call handler (on the loop, must not block) for each event, in order of arrival. A subject may have several, which
        share one subscription."""
        if subject in self._listeners:
            self._listeners[subject].append(handler)
            return
        handlers = self._listeners[subject] = [handler]

        async def on_message(message: Msg) -> None:
            try:
                event = decode_event(message.data)
            except msgspec.MsgspecError:
                self.counters.num_invalid_payloads += 1
                return
            for one in handlers:
                self._hand(event, one)

        await self._link.subscribe(subject, on_message)

    def _hand(self, event: Event, handler: EventHandler) -> None:
        try:
            handler(event)
        except Exception:
            self.counters.num_handler_errors += 1
            _log.exception("event handler failed", message=type(event).__name__)

    async def close(self) -> None:
        """Intake ends, running handlers are cancelled and their askers told, then the connection is closed."""
        await self._stop_serving(*self._served)
        await self._link.close()
        _fail(self._in_flight.values(), InstanceLost("the message bus was closed", code="bus_lost"))


def _fail(waiting: Iterable[_InFlight], error: InstanceLost) -> None:
    for one in waiting:
        if not one.reply.done():
            one.reply.set_exception(error)
