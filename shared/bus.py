"""The control plane on NATS: typed requests to one instance, events to whoever listens. See messages.py for what travels.

SIGNATURES ONLY for now; the body is being written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from triptych.shared.messages import Event, InstanceId, InstanceRequest, Message, Reply

RequestHandler = Callable[[InstanceRequest], Awaitable[Message | None]]
"""Answers a request with its reply; None for messages that are only published (ReleaseRequest, PullDone)."""
EventHandler = Callable[[Event], None]


class Bus:
    """One NATS connection. Every handler of a request runs as its own task, at most max_concurrent of them; more are
    answered Overloaded. A handler's TriptychError becomes an ErrorReply; any other exception an InternalError, logged once."""

    @classmethod
    async def connect(cls, url: str, name: str) -> Bus:
        """Retries for a while (the server may still be starting). error_cb is set and counted."""
        raise NotImplementedError

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Reply:
        """Raises InstanceLost when nobody answers there (NoResponders), DeadlineExceeded after timeout_s, or the typed
        error that was answered. Is `ControlPlane.request` of the transport."""
        raise NotImplementedError

    async def publish(self, instance_id: InstanceId, message: Message) -> None:
        """To one instance, unanswered."""
        raise NotImplementedError

    async def publish_event(self, subject: str, event: Event) -> None:
        raise NotImplementedError

    async def serve(self, instance_id: InstanceId, handler: RequestHandler, max_concurrent: int = 4096) -> None:
        """Take InstanceRequests at instance_subject(instance_id)."""
        raise NotImplementedError

    async def listen(self, subject: str, handler: EventHandler) -> None:
        """Call handler (on the loop, must not block) for each event, in order of arrival."""
        raise NotImplementedError

    async def close(self) -> None:
        """Drain and close. Running handlers are cancelled."""
        raise NotImplementedError
