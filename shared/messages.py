"""Every message on the bus: its fields and its subject. Nothing else defines one. Its wire form is wire.py's.

Tensors and media never ride on the bus: messages carry `TensorRef`s, and the consumer pulls (see shared/transport).
Durations are relative seconds: monotonic clocks of two processes don't compare.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from triptych.shared.errors import WireError
from triptych.shared.image_info import NO_LIMITS, ImageInfo, PixelLimits
from triptych.shared.instance_info import Demand, ModelCard, Resources, StageLoad, TransportAddress
from triptych.shared.message_parts import MAX_INLINE_TOKENS as MAX_INLINE_TOKENS
from triptych.shared.message_parts import InstanceId as InstanceId
from triptych.shared.message_parts import KvRef as KvRef
from triptych.shared.message_parts import PlacedImage as PlacedImage
from triptych.shared.message_parts import PrefixSource as PrefixSource
from triptych.shared.message_parts import PromptTokens as PromptTokens
from triptych.shared.message_parts import RequestId as RequestId
from triptych.shared.message_parts import TensorId as TensorId
from triptych.shared.message_parts import TensorRef as TensorRef
from triptych.shared.sampling_params import SamplingParams, TokenLogprobs

Service = Literal["router", "preprocess", "instance", "scaler", "launcher"]
Role = Literal["encoder", "prefill", "decode"]
State = Literal["starting", "ready", "draining", "failing"]  # failing: draining, since what it needs is broken
FinishReason = Literal["stop", "length", "abort"]

_PREFIX = "triptych.v1"
HEARTBEAT_SUBJECT = f"{_PREFIX}.heartbeat"
LOST_SUBJECT = f"{_PREFIX}.lost"


def instance_subject(instance_id: InstanceId) -> str:
    """Where one instance takes `InstanceRequest`s."""
    return f"{_PREFIX}.instance.{instance_id}"


def stream_subject(router_id: InstanceId) -> str:
    """Where one router takes `TokenBatch`es."""
    return f"{_PREFIX}.stream.{router_id}"


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, forbid_unknown_fields=False):
    """Base of all messages: tagged by class name, unknown fields ignored so that versions can differ by a field."""


class StageTime(msgspec.Struct, frozen=True):
    """Seconds spent in one stage of one request on one instance: waiting in its queue, pulling inputs, computing."""

    stage: str
    instance_id: InstanceId
    queued_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0


# --- requests to one instance; each is answered by its reply or by ErrorReply -------------------------------------------


class PreprocessRequest(Message, frozen=True):
    """Decode one media item: its bytes are here (content), or sent along (an upload, see wire.py), or at url (http, https), or
    kept as media_id. param names it in error messages. cache_salt: nothing is shared with requests of another one.
    may_skip_decode: a file whose picture is known already need only be identified (the reply then has no pixels, and the
    media_id under which the bytes wait for a second request)."""

    request_id: RequestId
    router_id: InstanceId
    param: str
    timeout_s: float
    url: str | None = None
    media_id: str | None = None
    limits: PixelLimits = NO_LIMITS
    cache_salt: bytes = b""
    may_skip_decode: bool = False
    content: bytes = b""


class PreprocessReply(Message, frozen=True):
    """pixels: uint8 [height, width, 3], RGB, already resized for the model; None when the file was only identified."""

    image: ImageInfo
    pixels: TensorRef | None
    time: StageTime
    media_id: str | None = None


class EncodeRequest(Message, frozen=True):
    """Lease the embeddings of an image, or of a part of one (whose pixels others pull, too), encoded from `pixels` unless they
    are held already. pixels None: only if they are held, else InstanceLost with code cache_miss. slack_s: until the request's
    first token is due; None: there is no such target. num_request_tokens: of all that is encoded for the request, as far as
    that is known."""

    request_id: RequestId
    router_id: InstanceId
    image: ImageInfo
    pixels: TensorRef | None
    timeout_s: float
    slack_s: float | None = None
    num_request_tokens: int = 0


class EncodeReply(Message, frozen=True):
    """embeddings: model dtype [num_tokens, hidden_size], as they enter the language model. is_cached: nothing was encoded."""

    embeddings: TensorRef
    time: StageTime
    is_cached: bool = False


class PrefillRequest(Message, frozen=True):
    """images are sorted by offset, disjoint, and in bounds of the prompt; the receiver checks that. An image without embeddings
    whose KV is not cached after all ends in InstanceLost with code cache_miss. prefix: whose KV to pull first. slack_s: as of
    EncodeRequest. num_output_tokens: the last so many tokens of the prompt are output already, of a request that went on
    elsewhere and lost its KV there."""

    request_id: RequestId
    router_id: InstanceId
    prompt: PromptTokens
    images: tuple[PlacedImage, ...]
    sampling: SamplingParams
    timeout_s: float
    cache_salt: bytes = b""
    prefix: PrefixSource | None = None
    slack_s: float | None = None
    num_output_tokens: int = 0


class EmbeddingsReady(Message, frozen=True):
    """To the prefill instance of a request: its image number `index`, which was awaited, is encoded. Answered by Accepted."""

    request_id: RequestId
    index: int
    embeddings: TensorRef


class BlocksRequest(Message, frozen=True):
    """From a prefill instance: lease the KV blocks with these digests, as many from the first on as are held, less the first
    num_held, which it has itself. timeout_s: how long the lease lasts."""

    request_id: RequestId
    router_id: InstanceId
    block_keys: bytes
    timeout_s: float
    num_held: int = 0


class BlocksReply(Message, frozen=True):
    """kv: as KvRef's tensor, of num_blocks blocks after num_held, None when there is none. layout: must equal the puller's."""

    num_blocks: int
    layout: str
    kv: TensorRef | None = None


class PrefillReply(Message, frozen=True):
    """finish_reason is set when first_token is also the last: then kv is None (and when it is "stop", first_token is the stop
    token itself, not to be shown). num_cached_tokens: those of the prompt whose KV was there already."""

    first_token: int
    time: StageTime
    finish_reason: FinishReason | None = None
    kv: KvRef | None = None
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0


class DecodeRequest(Message, frozen=True):
    """Go on after `output`, the output tokens so far (little-endian uint32), of which kv has all but the last. Chunks go to
    stream_subject(router_id), the first with that number for a seq, in few if `whole`. prompt_token_set: only with a repetition
    penalty, the prompt's token ids as bits (see token_set.py). long_output: in place of `output` where that is too long for a
    message, a uint8 tensor. An instance that handed the request over takes it back, also when it takes no other."""

    request_id: RequestId
    router_id: InstanceId
    kv: KvRef
    output: bytes
    num_prompt_tokens: int
    sampling: SamplingParams
    timeout_s: float
    prompt_token_set: bytes = b""
    whole: bool = False
    long_output: TensorRef | None = None


class Accepted(Message, frozen=True):
    """The request is queued: its result comes on the stream."""


class ReleaseRequest(Message, frozen=True):
    """Published, not answered: drop everything held or running for request_id at this instance. Idempotent."""

    request_id: RequestId


class DrainRequest(Message, frozen=True):
    """Take no new work, finish what is running, then leave (exit when `exit`)."""

    exit: bool = True


class SwitchRequest(Message, frozen=True):
    """Have these roles from now on, as one of this group of instances. Answered by SwitchReply; the roles that are taken away
    end behind it: they take nothing new, what they are at goes on, elsewhere where it can, and is given up after timeout_s."""

    roles: tuple[Role, ...]
    group: str = ""
    timeout_s: float = 30.0  # chosen


class SwitchReply(Message, frozen=True):
    """The roles take work, and all have been told. seconds: since the request came."""

    seconds: float


class HandOverRequest(Message, frozen=True):
    """Hand running requests over to other decode instances: the youngest, with num_tokens in context together, or all. Answered
    by Accepted; nothing happens where no other instance decodes."""

    num_tokens: int | None = None


class PullRequest(Message, frozen=True):
    """Ask a tensor's owner to make it available to `puller` by `channel` ("shared_memory", "gloo"; epoch names gloo's process
    group). shape, dtype, num_bytes: what the puller has room for; refused when they differ from what is stored."""

    tensor_id: TensorId
    puller: InstanceId
    channel: str
    transfer_id: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    timeout_s: float
    epoch: int = 0


class PullReply(Message, frozen=True):
    """shared_memory: the bytes lie at offset in the owner's arena until PullDone. gloo: a send is posted."""

    offset: int = 0


class PullDone(Message, frozen=True):
    """Published by the puller: the transfer is over; drop the tensor too when `release`. What was copied from a reference's
    offset needed no PullRequest."""

    tensor_id: TensorId
    puller: InstanceId
    transfer_id: int
    release: bool


class PairRequest(Message, frozen=True):
    """Ask a tensor owner to join the 2-rank process group named by (owner, puller, epoch), over the owner's TCPStore."""

    puller: InstanceId
    epoch: int
    timeout_s: float
    channel: Literal["gloo", "nccl"] = "gloo"  # nccl: device memory


class StatusRequest(Message, frozen=True):
    """To the scaler: what does the cluster look like?"""


class LaunchRequest(Message, frozen=True):
    """From the scaler to the local launcher: start the process of slot `name` again."""

    name: str


class ScaleOutRequest(Message, frozen=True):
    """From the scaler to the local launcher: start one more instance of a kind (policies/placement.py), for a group. Answered
    by Launched, before it is ready."""

    kind: str
    group: str = ""


class Launched(Message, frozen=True):
    """name: of the new instance's slot."""

    name: str


_Work = PreprocessRequest | EncodeRequest | PrefillRequest | EmbeddingsReady | DecodeRequest | ReleaseRequest
_Transfer = PullRequest | PullDone | PairRequest | BlocksRequest
_Change = DrainRequest | SwitchRequest | HandOverRequest
InstanceRequest = _Work | _Transfer | _Change | StatusRequest | LaunchRequest | ScaleOutRequest


class ErrorReply(Message, frozen=True):
    error: WireError


class TokenChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """Output tokens [seq, seq + len(token_ids)) of a request, with as many logprobs when they were asked for. The chunk with
    finish_reason or error is the last one, that with kv the last from this instance: it handed the request over, and has
    leased its KV to whoever goes on. These carry time; an empty chunk is a sign of life."""

    request_id: RequestId
    seq: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: WireError | None = None
    time: StageTime | None = None
    kv: KvRef | None = None

    @property
    def is_last(self) -> bool:
        """Of those from its instance."""
        return self.finish_reason is not None or self.error is not None or self.kv is not None


class TokenBatch(Message, frozen=True):
    """All chunks that one decode step made for one router."""

    instance_id: InstanceId
    chunks: tuple[TokenChunk, ...]


class Heartbeat(Message, frozen=True):
    """Published every heartbeat_interval_s by every process; the registry is nothing but the recent ones. demand: a
    router's, by group of requests. group: of an instance, whose requests it is for; "": anybody's (policies/groups.py).
    takes_follow_ups: it has no prefill role, and computes prompts of which it holds most (policies/follow_ups.py)."""

    instance_id: InstanceId
    name: str
    service: Service
    state: State
    roles: tuple[Role, ...]
    http_url: str
    interval_s: float
    host: str
    loads: tuple[StageLoad, ...]
    resources: Resources
    model: ModelCard | None = None
    transport: TransportAddress | None = None
    demand: dict[str, Demand] = {}
    group: str = ""
    takes_follow_ups: bool = False


class Lost(Message, frozen=True):
    """Published by whoever saw an instance end: the launcher, or the instance itself as its last word. expected: a
    DrainRequest asked for it, so that it stays ended. Not so a signal that somebody sent."""

    instance_id: InstanceId
    name: str
    exit_code: int
    expected: bool


class StatusReply(Message, frozen=True):
    instances: tuple[Heartbeat, ...]
    num_restarts: int


Event = TokenBatch | Heartbeat | Lost
_Done = Accepted | SwitchReply | Launched
Reply = PreprocessReply | EncodeReply | PrefillReply | BlocksReply | PullReply | StatusReply | _Done | ErrorReply
