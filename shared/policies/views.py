"""What policies may see: read-only views that live processes and the simulator satisfy without copying."""

from __future__ import annotations

from typing import Protocol

from triptych.shared.messages import InstanceId


class StageView(Protocol):
    """One instance as a candidate for the next piece of work of one stage.

    num_requests: waiting and running there. num_pending_tokens: tokens that it has not computed yet (vision tokens for an
    encoder, prompt tokens that are not cached for prefill), or tokens in context for decode. num_free_blocks: KV blocks that
    new work may take. tokens_per_s: what this stage computed there lately, while it was busy; 0 before anything was. other_s:
    seconds of computing that the instance's other stages have waiting for the same engine; 0 where they are not known.
    has_images: whether it has images to encode. decodes: whether outputs may go on there, so that no KV moves.
    All but tokens_per_s include work that was dispatched but that the instance has not reported yet.
    """

    @property
    def instance_id(self) -> InstanceId: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def num_pending_tokens(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def tokens_per_s(self) -> float: ...

    @property
    def other_s(self) -> float: ...

    @property
    def has_images(self) -> bool: ...

    @property
    def decodes(self) -> bool: ...
