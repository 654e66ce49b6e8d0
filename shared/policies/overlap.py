"""Whether a request's prompt is computed while its images are still encoded. Pure; each decision with its reason. Ours: both
papers, and all systems that split these stages, wait for all images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_GAIN_SHARE = 0.05  # chosen: of the time to the first token; as much is lost by choosing the prefill instance early
MIN_GAIN_S = 0.002  # chosen: a message for each image, a step for each piece of the prompt


@dataclass(frozen=True, slots=True)
class Verdict:
    """is_yes, and why, in words for logs and traces. gain_s: predicted, of the time to the first token."""

    is_yes: bool
    reason: str
    gain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PendingImage:
    """An image whose embeddings are not there: offset: of its first token in what is to be computed. ready_s: from now."""

    offset: int
    ready_s: float


@dataclass(frozen=True, slots=True)
class OverlapView:
    """A prompt of num_tokens that are not cached, computed by tokens_per_s in an instance that begins in wait_s, and its images
    by offset. num_others: requests that wait, run or decode there. attends_to_all: tokens before an image attend to it
    (CroAttn)."""

    num_tokens: int
    tokens_per_s: float
    wait_s: float
    images: Sequence[PendingImage]
    num_others: int = 0
    attends_to_all: bool = False

    def barrier_s(self) -> float:
        """Time to the first token when the prompt waits for all images. The queue shrinks meanwhile."""
        ready_s = max((image.ready_s for image in self.images), default=0.0)
        return max(self.wait_s, ready_s) + self.num_tokens / self.tokens_per_s

    def overlapped_s(self) -> float:
        """The same when it is computed up to the first missing image, and on as each lands."""
        at_s, done = self.wait_s, 0
        for image in self.images:
            at_s = max(at_s + (image.offset - done) / self.tokens_per_s, image.ready_s)
            done = image.offset
        return at_s + (self.num_tokens - done) / self.tokens_per_s


Overlap = Callable[[OverlapView], Verdict]
"""Whether a prompt goes to prefill before all of its images are encoded."""


def never(view: OverlapView) -> Verdict:
    """The barrier of all other systems."""
    return Verdict(False, "prompts wait for all their images")


def always(view: OverlapView) -> Verdict:
    """Wherever there is something to wait for and the model allows it."""
    if not view.images or view.attends_to_all:
        return Verdict(False, "nothing can be computed before the images" if view.images else "no image is missing")
    return Verdict(True, "prompts never wait for all their images", view.barrier_s() - view.overlapped_s())


def by_gain(view: OverlapView) -> Verdict:
    """When it shortens the time to the first token by more than it costs: each piece of the prompt is a step more, that holds
    up all others there. One image after a short text gains next to nothing: then the prefill instance is better chosen late,
    when its load is known."""
    verdict = always(view)
    if not verdict.is_yes:
        return verdict
    needed_s = max(MIN_GAIN_S, MIN_GAIN_SHARE * view.barrier_s()) * (1 + view.num_others)
    pays = verdict.gain_s >= needed_s
    return Verdict(pays, f"gains {verdict.gain_s:.3f} s of {view.barrier_s():.3f} s, {needed_s:.3f} s needed", verdict.gain_s)
