"""What the host of an instance gives to its roles: engine, KV blocks, caches, transport, and what they are asked to go by.

services/instance_parts.py makes one for an instance; roles know neither the host nor each other. No torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from triptych.cache.index import CacheIndex
from triptych.services.embedding_cache import EmbeddingCache
from triptych.services.instance_metrics import InstanceMetrics
from triptych.services.prefix_cache import PrefixCache
from triptych.shared.engine.api import Engine
from triptych.shared.engine.emulated_steps import EmulatedSteps
from triptych.shared.engine.health import EngineHealth
from triptych.shared.engine.kv_blocks import KvBlocks
from triptych.shared.engine.thread import EngineCalls, Turn
from triptych.shared.errors import DeadlineExceeded, InstanceLost
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import Event, InstanceId, Message, Reply, Role, TensorRef
from triptych.shared.policies.policy_set import PolicySet
from triptych.shared.request_tasks import RequestTasks
from triptych.shared.settings import Settings
from triptych.shared.transport.api import Transport

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch

B = TypeVar("B")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostContext:
    """What a role works with. max_model_len: longest prompt + output in tokens that model, KV pool and store allow.
    peer_address: how to reach an instance's tensors, None when it is not known (any more); may wait for its first heartbeat.
    has_peer: whether another instance takes work of a role.
    index: the caches tell it what they hold. ask: Bus.request. host_memory: a new tensor outside of the accelerator, not
    initialised. steps_ahead: where the engine is emulated."""

    settings: Settings
    policies: PolicySet
    instance_id: InstanceId
    engine: Engine
    thread: EngineCalls
    health: EngineHealth
    kv: KvBlocks
    prefixes: PrefixCache
    embeddings: EmbeddingCache
    index: CacheIndex
    transport: Transport
    tasks: RequestTasks
    metrics: InstanceMetrics
    max_model_len: int
    peer_address: Callable[[InstanceId], Awaitable[TransportAddress | None]]
    has_peer: Callable[[Role], bool]
    ask: Callable[[InstanceId, Message, float], Awaitable[Reply]]
    publish_event: Callable[[str, Event], Awaitable[None]]
    host_memory: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
    steps_ahead: EmulatedSteps | None

    async def compute(self, call: Callable[[B], list[T]], batch: B, turn: Turn) -> list[T]:
        """call(batch) as an engine call; what came of each item, results and exceptions."""
        outcomes = await self.thread.run_in_turn(turn, call, batch)
        self.health.note(outcomes)
        return outcomes

    async def pull(self, ref: TensorRef, release: bool = True) -> torch.Tensor:
        """A peer's tensor, which the peer drops then (release); one of our own without copying, to be released after use.

        Raises:
            InstanceLost: the owner is gone, silent for transfer_timeout_s, or no longer holds it.
        """
        if ref.owner == self.instance_id:
            return self.transport.get(ref)
        peer = await self.peer_address(ref.owner)
        if peer is None:
            raise InstanceLost("an instance that holds a part of the request is gone", instance_id=ref.owner)
        try:
            return await self.transport.pull(ref, peer, self.settings.transfer_timeout_s, release)
        except DeadlineExceeded:
            raise InstanceLost("a tensor transfer took too long", instance_id=ref.owner, code="transfer_timeout") from None

    async def pull_kv(self, ref: TensorRef) -> torch.Tensor:
        """The same of KV, which is counted where it moves."""
        tensor = await self.pull(ref)
        if ref.owner != self.instance_id:
            self.metrics.kv_bytes_moved.inc(ref.num_bytes)
        return tensor

    def drop(self, ref: TensorRef) -> None:
        """After `pull`: release the tensor when it is our own."""
        if ref.owner == self.instance_id:
            self.transport.release(ref.tensor_id)
