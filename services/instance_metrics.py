"""What an instance really computed, as Prometheus counters: what its caches save is missing here."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class InstanceMetrics:
    """One per instance."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.images = Counter("triptych_images_encoded", "images that went through the vision tower", registry=registry)
        self.pixel_transfers = Counter(
            "triptych_pixel_transfers", "pictures, or parts of such, whose pixels were pulled", registry=registry
        )
        self.prompt_tokens = Counter(
            "triptych_prompt_tokens_computed", "tokens of prompts, without the cached ones", registry=registry
        )
        self.kv_pulls = Counter("triptych_kv_pulls", "cached beginnings of prompts pulled from peers", registry=registry)
        self.kv_bytes_moved = Counter("triptych_kv_bytes_moved", "bytes of KV that were pulled from peers", registry=registry)
        self.follow_ups = Counter(
            "triptych_follow_ups", "prompts that a decode instance computed the end of, as it holds the rest", registry=registry
        )
        self.integrity_failures = Counter(
            "triptych_kv_integrity_failures", "idle checks that found KV blocks unaccounted for", registry=registry
        )
        self.is_checked = Gauge(
            "triptych_kv_integrity_checked", "1 when nothing was handled since the last idle check", registry=registry
        )
