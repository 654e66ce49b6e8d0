"""What is to be answered, and what all requests of a router share. Types only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from triptych.services.router.cached_parts import Cache
from triptych.services.router.data_url import ImageSource
from triptych.services.router.demand import DemandCounter
from triptych.services.router.dispatch import Dispatcher
from triptych.services.router.load_book import LoadBook
from triptych.services.router.media_gate import MediaGate
from triptych.services.router.prompt import Prompt
from triptych.services.router.routing import Routing
from triptych.services.router.sampling_fields import NO_TERMS, Terms
from triptych.services.router.siblings import Siblings
from triptych.services.router.token_streams import TokenStreams
from triptych.services.router.uploads import Uploader
from triptych.shared.bus import Bus
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import InstanceId, RequestId
from triptych.shared.policies.transfers import Transfers
from triptych.shared.sampling_params import SamplingParams

MAX_GIVEN_UP = 8  # chosen: of one piece of work; roles change some times a minute, what ends instances must not go on


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be answered. sampling.max_tokens 0: what the context leaves. is_streaming: tokens go out as they come.
    is_watched: they are looked at as they come, since a stop string may end the output. sources: the pictures. param: the
    prompt's field, for errors. siblings: the other choices of the request, where one's pictures are of use to all."""

    prompt: Prompt
    sources: list[ImageSource]
    sampling: SamplingParams
    is_streaming: bool
    is_watched: bool = False
    param: str = "messages"
    terms: Terms = NO_TERMS
    siblings: Siblings | None = None

    @property
    def follows(self) -> bool:
        """Whether another choice of the request has gone ahead with its pictures."""
        return self.siblings is not None and bool(self.siblings.images)

    @property
    def is_whole(self) -> bool:
        """Nobody looks at the output before its end."""
        return not (self.is_streaming or self.is_watched)

    def let_go_of_files(self, images: Sequence[ImageInfo]) -> None:
        """Of a stream that has begun, which may last. images: what they show. Another attempt finds them, or their KV, where
        they are cached."""
        if self.is_streaming:
            self.sources[:] = map(ImageSource.without_content, self.sources, images)


@dataclass(frozen=True, slots=True)
class Limits:
    """max_model_len: prompt and output tokens together. stop_token_ids: the model's own. slo_ttft_*_s: the targets of requests
    that name none; 0: no target."""

    max_model_len: Callable[[], int]
    stop_token_ids: tuple[int, ...]
    max_attempts: int
    slo_ttft_text_s: float = 0.0
    slo_ttft_picture_s: float = 0.0

    @property
    def longest_slo_ttft_s(self) -> float:
        """Of all classes of requests."""
        return max(self.slo_ttft_text_s, self.slo_ttft_picture_s)

    def slo_ttft_s(self, job: Job) -> float | None:
        """From a request's arrival until its first token is due; None: there is no such target."""
        own = self.slo_ttft_picture_s if job.sources else self.slo_ttft_text_s
        return job.terms.slo_ttft_s or own or None


@dataclass(frozen=True, slots=True)
class Parts:
    """What all requests of a router share. release: tell instances to let go of what they hold for an attempt."""

    router_id: InstanceId
    bus: Bus
    book: LoadBook
    routing: Routing
    cache: Cache
    dispatcher: Dispatcher
    streams: TokenStreams
    uploader: Uploader
    gate: MediaGate
    limits: Limits
    release: Callable[[RequestId, Collection[InstanceId]], None]
    demand: DemandCounter
    transfers: Transfers
