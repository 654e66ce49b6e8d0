"""What a process tells of itself in its heartbeat: parts of messages (see messages.py)."""

from __future__ import annotations

import msgspec


class TransportAddress(msgspec.Struct, frozen=True):
    """How peers reach an instance's tensors: by its shared-memory arena, if they can open the path and read the token there,
    or by its TCPStore."""

    arena_path: str
    arena_token: str
    store_host: str
    store_port: int


class StageLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one role of one instance has to do: requests waiting and running, and tokens not yet computed (vision tokens
    for an encoder, prompt tokens for prefill, tokens in context for decode). tokens_per_s: what it lately computed while it was
    busy; 0 before anything was."""

    stage: str
    num_waiting: int = 0
    num_running: int = 0
    num_pending_tokens: int = 0
    tokens_per_s: float = 0.0


class Demand(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a router was asked for by one group of requests, counted since its start: whoever reads differences gets rates.
    Requests and images count when they arrive, image tokens when they are known, output tokens at a request's end. num_in_time:
    of those that ended, how many were answered, and within their targets where they have any."""

    num_requests: int = 0
    num_text_tokens: int = 0
    num_images: int = 0
    num_image_tokens: int = 0
    num_output_tokens: int = 0
    num_ended: int = 0
    num_in_time: int = 0


class PoolStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pool of the prefix cache of one instance, counted since its start. num_stale: asked for because the index said so,
    and not there."""

    num_bytes: int = 0
    capacity_bytes: int = 0
    num_entries: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_stale: int = 0
    num_evicted: int = 0


class Resources(msgspec.Struct, frozen=True, omit_defaults=True):
    pid: int
    num_threads: int
    pss_bytes: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_leased_blocks: int = 0
    tensor_store_bytes: int = 0
    tensor_store_capacity_bytes: int = 0
    num_leases: int = 0
    media_store_bytes: int = 0
    embeddings: PoolStats | None = None
    kv_prefixes: PoolStats | None = None


class Emulation(msgspec.Struct, frozen=True):
    """Instances without GPUs, whose times come from a cost model. gpu: the class that they stand for. time_scale: modelled
    seconds per real second; all times that are told are real ones."""

    gpu: str
    time_scale: float

    def __str__(self) -> str:
        return f"emulated {self.gpu}, {self.time_scale:g} modelled seconds a second"


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which model an instance serves; a router only joins instances of one model and revision. emulation: None for a real
    engine."""

    name: str
    revision: str
    max_model_len: int
    random_weights: bool = False
    emulation: Emulation | None = None
