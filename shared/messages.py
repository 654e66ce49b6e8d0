"""Every message on the bus: its fields and its subject. Nothing else defines one. Its wire form is wire.py's.

Tensors and media never ride on the bus: messages carry `TensorRef`s, and the consumer pulls (see shared/transport).
Durations are relative seconds: monotonic clocks of two processes don't compare.
"""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

from triptych.shared.errors import WireError
from triptych.shared.image_info import NO_LIMITS, ImageInfo, PixelLimits
from triptych.shared.instance_info import Demand, ModelCard, Resources, StageLoad, TransportAddress
from triptych.shared.sampling_params import SamplingParams, TokenLogprobs

InstanceId = NewType("InstanceId", str)  # one life of one process, `encoder-0-5f3a2c1b`: slot name and incarnation
RequestId = NewType("RequestId", str)
TensorId = NewType("TensorId", str)

MAX_INLINE_TOKENS = 12_000  # chosen: 4 bytes each, leaves 16 KB for the rest of a message; a longer prompt is a TensorRef

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


class TensorRef(msgspec.Struct, frozen=True):
    """A tensor leased in its owner's store, to be pulled over the transport.
    shape and dtype (`uint8`, `float32`, `bfloat16`, ...) describe the contiguous tensor; num_bytes is its exact size.
    The owner may drop it lease_s seconds after it was stored, or when its request is released.
    offset: where it lies in the owner's arena while it is leased; None when it is only put there for a PullRequest.
    """

    tensor_id: TensorId
    owner: InstanceId
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    lease_s: float
    offset: int | None = None


class PlacedImage(msgspec.Struct, frozen=True):
    """An image's place in the unified sequence: its num_tokens placeholders start at `offset`. embeddings None: its KV should
    be cached where the prompt goes, or, when is_awaited, they come later with EmbeddingsReady."""

    image: ImageInfo
    offset: int
    embeddings: TensorRef | None = None
    is_awaited: bool = False


class PromptTokens(msgspec.Struct, frozen=True):
    """The unified sequence (placeholders expanded) as little-endian uint32: inline, or leased when longer than
    MAX_INLINE_TOKENS (a uint8 tensor of 4 * num_tokens bytes)."""

    num_tokens: int
    inline: bytes = b""
    leased: TensorRef | None = None


class KvRef(msgspec.Struct, frozen=True):
    """A request's KV blocks, leased by the prefill instance. `tensor` has shape [num_layers, 2, num_blocks, block_size,
    num_kv_heads, head_dim]; the first num_computed_tokens slots are valid. `layout` must equal the puller's own.
    position_delta is added to a token's index to get its rotary position (multimodal rotary positions run behind).
    block_keys: what the first block's digest is a digest of and those of the full blocks, one after another, and key_tail: what
    the unfinished block holds (cache/block_keys.py); both empty when there are too many for a message, or nothing is
    cached: then the blocks are not cached where they go either."""

    tensor: TensorRef
    num_computed_tokens: int
    block_size: int
    position_delta: int
    layout: str
    block_keys: bytes = b""
    key_tail: bytes = b""


class PrefixSource(msgspec.Struct, frozen=True):
    """Who is thought to hold the KV of the first num_blocks blocks of a prompt, when it is worth pulling from there."""

    instance_id: InstanceId
    num_blocks: int


class StageTime(msgspec.Struct, frozen=True):
    """Seconds spent in one stage of one request on one instance: waiting in its queue, pulling inputs, computing."""

    stage: str
    instance_id: InstanceId
    queued_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0


# --- requests to one instance; each is answered by its reply or by ErrorReply -------------------------------------------


class PreprocessRequest(Message, frozen=True):
    """Decode one media item: its bytes are sent along (an upload, see wire.py), or at url (http, https), or kept as media_id.
    param names it in error messages. cache_salt: nothing is shared with requests of another one. may_skip_decode: a file whose
    picture is known already need only be identified (the reply then has no pixels, and the media_id under which the bytes wait
    for a second request)."""

    request_id: RequestId
    router_id: InstanceId
    param: str
    timeout_s: float
    url: str | None = None
    media_id: str | None = None
    limits: PixelLimits = NO_LIMITS
    cache_salt: bytes = b""
    may_skip_decode: bool = False


class PreprocessReply(Message, frozen=True):
    """pixels: uint8 [height, width, 3], RGB, already resized for the model; None when the file was only identified."""

    image: ImageInfo
    pixels: TensorRef | None
    time: StageTime
    media_id: str | None = None


class EncodeRequest(Message, frozen=True):
    """Lease the image's embeddings, encoded from `pixels` unless they are held already. pixels None: only if they are held,
    else InstanceLost with code cache_miss. slack_s: until the request's first token is due; None: there is no such target."""

    request_id: RequestId
    router_id: InstanceId
    image: ImageInfo
    pixels: TensorRef | None
    timeout_s: float
    slack_s: float | None = None


class EncodeReply(Message, frozen=True):
    """embeddings: model dtype [num_tokens, hidden_size], as they enter the language model. is_cached: nothing was encoded."""

    embeddings: TensorRef
    time: StageTime
    is_cached: bool = False


class PrefillRequest(Message, frozen=True):
    """images are sorted by offset, disjoint, and in bounds of the prompt; the receiver checks that. An image without embeddings
    whose KV is not cached after all ends in InstanceLost with code cache_miss. prefix: whose KV to pull first. slack_s: as of
    EncodeRequest."""

    request_id: RequestId
    router_id: InstanceId
    prompt: PromptTokens
    images: tuple[PlacedImage, ...]
    sampling: SamplingParams
    timeout_s: float
    cache_salt: bytes = b""
    prefix: PrefixSource | None = None
    slack_s: float | None = None


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
    """Continue after first_token. Chunks go to stream_subject(router_id), the first with seq 1, in few if `whole`.
    prompt_token_set: only with a repetition penalty, the prompt's token ids as bits (see token_set.py)."""

    request_id: RequestId
    router_id: InstanceId
    kv: KvRef
    first_token: int
    num_prompt_tokens: int
    sampling: SamplingParams
    timeout_s: float
    prompt_token_set: bytes = b""
    whole: bool = False


class Accepted(Message, frozen=True):
    """The request is queued: its result comes on the stream."""


class ReleaseRequest(Message, frozen=True):
    """Published, not answered: drop everything held or running for request_id at this instance. Idempotent."""

    request_id: RequestId


class DrainRequest(Message, frozen=True):
    """Take no new work, finish what is running, then leave (exit when `exit`)."""

    exit: bool = True


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
InstanceRequest = _Work | _Transfer | DrainRequest | StatusRequest | LaunchRequest | ScaleOutRequest


class ErrorReply(Message, frozen=True):
    error: WireError


class TokenChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """Output tokens [seq, seq + len(token_ids)) of a request, with as many logprobs when they were asked for. The chunk with
    finish_reason or error is the last one and carries time; an empty chunk is a sign of life."""

    request_id: RequestId
    seq: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: WireError | None = None
    time: StageTime | None = None


class TokenBatch(Message, frozen=True):
    """All chunks that one decode step made for one router."""

    instance_id: InstanceId
    chunks: tuple[TokenChunk, ...]


class Heartbeat(Message, frozen=True):
    """Published every heartbeat_interval_s by every process; the registry is nothing but the recent ones. demand: of a router,
    by group of requests."""

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
_Done = Accepted | Launched
Reply = PreprocessReply | EncodeReply | PrefillReply | BlocksReply | PullReply | StatusReply | _Done | ErrorReply
