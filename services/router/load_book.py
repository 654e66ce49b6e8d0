"""How loaded each instance is as far as this router knows: the last heartbeat, and what was dispatched since. Loop only."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triptych.services.router.record import Stage
from triptych.shared.messages import Heartbeat, InstanceId
from triptych.shared.registry import Registry


@dataclass(frozen=True, slots=True)
class InstanceView:
    """A `StageView` of the policies."""

    instance_id: InstanceId
    num_requests: int
    num_pending_tokens: int
    num_free_blocks: int


@dataclass(slots=True)
class _Outstanding:
    """Our own dispatches to one stage of one instance: all that are open, and the change since `heartbeat`, which tells of
    the earlier ones itself."""

    num_requests: int = 0
    num_tokens: int = 0
    heartbeat: Heartbeat | None = None
    requests_since: int = 0
    tokens_since: int = 0

    def see(self, heartbeat: Heartbeat) -> None:
        if heartbeat is not self.heartbeat:
            self.heartbeat, self.requests_since, self.tokens_since = heartbeat, 0, 0

    def add(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        self.requests_since += num_requests
        self.tokens_since += num_tokens


class LoadBook:
    """Candidates of a stage, with loads that include what no heartbeat can tell yet."""

    def __init__(self, registry: Registry, revision: str, block_size: int) -> None:
        self._registry = registry
        self._revision = revision
        self._block_size = block_size
        self._outstanding: dict[tuple[InstanceId, Stage], _Outstanding] = {}
        self._suspects: dict[InstanceId, Heartbeat | None] = {}

    def __len__(self) -> int:
        return len(self._outstanding)

    def instances(self, stage: Stage) -> list[Heartbeat]:
        """Ready instances of a stage that serve our model."""
        beats = self._registry.ready(service="preprocess") if stage == "preprocess" else self._registry.ready(role=stage)
        return [beat for beat in beats if beat.model is None or beat.model.revision == self._revision]

    def views(self, stage: Stage, leave_out: Collection[InstanceId] = ()) -> list[InstanceView]:
        """Candidates for `stage`, less those that refused (leave_out) and those that nobody answered at."""
        return [
            self._view(beat, stage)
            for beat in self.instances(stage)
            if beat.instance_id not in leave_out and not self._is_suspect(beat)
        ]

    @contextmanager
    def hold(self, instance_id: InstanceId, stage: Stage, num_tokens: int) -> Iterator[None]:
        """One request with num_tokens tokens is with that instance inside the block."""
        key = (instance_id, stage)
        entry = self._outstanding.setdefault(key, _Outstanding(heartbeat=self._registry.get(instance_id)))
        entry.add(1, num_tokens)
        try:
            yield
        finally:
            entry.add(-1, -num_tokens)
            if entry.num_requests == 0:
                del self._outstanding[key]

    def suspect(self, instance_id: InstanceId) -> None:
        """Nobody answered there: leave it out until it beats again (or is declared lost)."""
        self._suspects[instance_id] = self._registry.get(instance_id)

    def on_lost(self, instance_id: InstanceId) -> None:
        self._suspects.pop(instance_id, None)

    def _is_suspect(self, beat: Heartbeat) -> bool:
        if beat.instance_id not in self._suspects:
            return False
        if self._suspects[beat.instance_id] is beat:
            return True
        del self._suspects[beat.instance_id]
        return False

    def _view(self, beat: Heartbeat, stage: Stage) -> InstanceView:
        load = next((load for load in beat.loads if load.stage == stage), None)
        reported_requests = load.num_waiting + load.num_running if load else 0
        reported_tokens = load.num_pending_tokens if load else 0
        free_blocks = beat.resources.num_free_blocks + beat.resources.num_cached_blocks
        ours = self._outstanding.get((beat.instance_id, stage))
        if ours is None:
            return InstanceView(beat.instance_id, reported_requests, reported_tokens, free_blocks)
        ours.see(beat)
        return InstanceView(
            beat.instance_id,
            max(ours.num_requests, reported_requests + ours.requests_since),
            max(ours.num_tokens, reported_tokens + ours.tokens_since),
            free_blocks - max(0, ours.tokens_since) // self._block_size,
        )
