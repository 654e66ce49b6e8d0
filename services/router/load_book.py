"""How loaded each instance is as far as this router knows: the last heartbeat, and what was dispatched since. Loop only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from triptych.services.router.record import STAGES, Stage
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import Heartbeat, InstanceId
from triptych.shared.registry import Registry

_NO_LOAD = StageLoad("")


@dataclass(frozen=True, slots=True)
class InstanceView:
    """A `StageView` of the policies."""

    instance_id: InstanceId
    num_requests: int
    num_pending_tokens: int
    num_free_blocks: int
    tokens_per_s: float
    other_s: float
    has_images: bool
    decodes: bool
    group: str = ""


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


@dataclass(frozen=True, slots=True)
class _Told:
    """What the heartbeats say, read once until the next: a request asks a dozen times. num_changes: the registry's, then."""

    num_changes: int
    instances: Mapping[Stage, list[Heartbeat]]
    num_with_kv: int
    some_encode_and_prefill: bool


class LoadBook:
    """Candidates of a stage, with loads that include what no heartbeat can tell yet."""

    def __init__(self, registry: Registry, revision: str, block_size: int) -> None:
        self._registry = registry
        self._revision = revision
        self._block_size = block_size
        self._outstanding: dict[tuple[InstanceId, Stage], _Outstanding] = {}
        self._suspects: dict[InstanceId, Heartbeat | None] = {}
        self._told = _Told(-1, {}, 0, False)

    def __len__(self) -> int:
        return len(self._outstanding)

    def instances(self, stage: Stage) -> list[Heartbeat]:
        """Ready instances of a stage that serve our model."""
        return self._read().instances[stage]

    @property
    def num_with_kv(self) -> int:
        """Instances that may hold KV of prompts."""
        return self._read().num_with_kv

    @property
    def some_encode_and_prefill(self) -> bool:
        """Whether there are instances that do both."""
        return self._read().some_encode_and_prefill

    def _read(self) -> _Told:
        if self._told.num_changes != self._registry.num_changes:
            beats = [beat for beat in self._registry.ready() if beat.model is None or beat.model.revision == self._revision]
            instances = {stage: [beat for beat in beats if stage in (*beat.roles, beat.service)] for stage in STAGES}
            ids = {stage: {beat.instance_id for beat in instances[stage]} for stage in STAGES}
            self._told = _Told(
                num_changes=self._registry.num_changes,
                instances=instances,
                num_with_kv=len(ids["prefill"] | ids["decode"]),
                some_encode_and_prefill=bool(ids["encoder"] & ids["prefill"]),
            )
        return self._told

    def is_ready(self, instance_id: InstanceId) -> bool:
        """Whether it is there and takes work."""
        beat = self._registry.get(instance_id)
        return beat is not None and beat.state == "ready"

    def views(self, stage: Stage, leave_out: Collection[InstanceId] = ()) -> list[InstanceView]:
        """Candidates for `stage`, less those that refused (leave_out) and those that nobody answered at."""
        return [
            self._view(beat, stage)
            for beat in self.instances(stage)
            if beat.instance_id not in leave_out and not self._is_suspect(beat)
        ]

    def hosts(self, instance_ids: Iterable[InstanceId]) -> list[InstanceView]:
        """Those of these instances that take follow-ups, or all prompts, as candidates to compute the end of one. Their own
        pace is that of short prompts, which take everybody longer by the token: it tells nothing."""
        beats = [beat for beat in map(self._registry.get, instance_ids) if beat is not None and beat.state == "ready"]
        able = [beat for beat in beats if beat.takes_follow_ups or "prefill" in beat.roles]
        return [replace(self._view(beat, "prefill"), tokens_per_s=0.0) for beat in able if not self._is_suspect(beat)]

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
        load = _load_of(beat, stage)
        num_requests, num_tokens, tokens_since = self._work(beat, stage, load)
        free_blocks = beat.resources.num_free_blocks + beat.resources.num_cached_blocks
        return InstanceView(
            beat.instance_id,
            num_requests,
            num_tokens,
            free_blocks - max(0, tokens_since) // self._block_size,
            load.tokens_per_s,
            sum(self._pending_s(beat, other) for other in beat.loads if other.stage != stage),
            self._work(beat, "encoder", _load_of(beat, "encoder"))[1] > 0,
            "decode" in beat.roles,
            beat.group,
        )

    def _work(self, beat: Heartbeat, stage: Stage, load: StageLoad) -> tuple[int, int, int]:
        """Requests and tokens of one stage there, ours that it has not told of included, and how many tokens these are."""
        num_requests = load.num_waiting + load.num_running
        ours = self._outstanding.get((beat.instance_id, stage))
        if ours is None:
            return num_requests, load.num_pending_tokens, 0
        ours.see(beat)
        num_requests = max(ours.num_requests, num_requests + ours.requests_since)
        return num_requests, max(ours.num_tokens, load.num_pending_tokens + ours.tokens_since), ours.tokens_since

    def _pending_s(self, beat: Heartbeat, load: StageLoad) -> float:
        """Of computing. Tokens that are decoded are no work yet to do."""
        if load.stage == "decode" or not load.tokens_per_s:
            return 0.0
        return self._work(beat, cast(Stage, load.stage), load)[1] / load.tokens_per_s


def _load_of(beat: Heartbeat, stage: Stage) -> StageLoad:
    for load in beat.loads:
        if load.stage == stage:
            return load
    return _NO_LOAD
