"""What the cache of known files saves, as Prometheus counters: pictures decoded, only identified, and pixels pulled."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from triptych.shared.messages import PullRequest

NUM_PIXEL_DIMS = 3  # height, width, channel; long prompts, the other tensors here, have one


class PreprocessMetrics:
    """One per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decodes = Counter("triptych_pictures_decoded", "pictures decoded and resized", registry=registry)
        self.identified = Counter(
            "triptych_pictures_identified", "pictures known by their file, not decoded", registry=registry
        )
        self._pixel_transfers = Counter("triptych_pixel_transfers", "pictures whose pixels were pulled", registry=registry)

    def on_pull(self, request: PullRequest) -> None:
        """Count a pull of pixels."""
        if len(request.shape) == NUM_PIXEL_DIMS:
            self._pixel_transfers.inc()
