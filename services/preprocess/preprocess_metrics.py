"""What the cache of known files saves, as Prometheus counters: pictures decoded, and only identified."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class PreprocessMetrics:
    """One per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decodes = Counter("triptych_pictures_decoded", "pictures decoded and resized", registry=registry)
        self.identified = Counter(
            "triptych_pictures_identified", "pictures known by their file, not decoded", registry=registry
        )
