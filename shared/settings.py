"""All settings of all processes: TRIPTYCH_* environment variables, each with a command-line twin.

An unknown TRIPTYCH_* variable fails with its name and what is allowed. Durations are seconds, sizes are bytes.
"""

from __future__ import annotations

import difflib
import os
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from triptych.shared.errors import BadRequest

PREFIX = "TRIPTYCH_"


class Settings(BaseSettings):
    """Bounds are chosen for one machine of 2 to 64 cores; the origin of each number is in its description."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    # what is served
    model: str = Field("", description="checkpoint folder or hub id")
    model_name: str = Field("", description="name in the API; default: the last part of `model`")
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    max_model_len: int = Field(0, ge=0, description="longest prompt + output; 0: what the model and the KV pool allow")

    # where things are
    nats_url: str = Field("", description="an existing NATS server; empty: `triptych up` starts one")
    redis_url: str = Field("", description="an existing Redis server; empty: `triptych up` starts one")
    bind_host: str = Field("127.0.0.1", description="address to listen on; `hostname`: this host's own address")
    port: int = Field(8000, ge=0, le=65535, description="the router's HTTP port; 0: a free one")
    name: str = Field("", description="slot name of this process, such as encoder-0; default: made from its stage")

    # the engine
    threads: int = Field(0, ge=0, description="torch threads of an instance; 0: the cores on which no other one computes")
    cores_file: str = Field("", description="where engines that share cores find each other; empty: one of the user's own")
    engine_instances: int = Field(3, ge=1, description="engine instances on this machine: how few threads one has at least")
    block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    kv_cache_bytes: int = Field(256 << 20, ge=1 << 16, description="memory of one instance's KV pool")
    embedding_cache_bytes: int = Field(256 << 20, ge=0, description="embeddings that one instance keeps (chosen)")
    max_num_seqs: int = Field(64, ge=1, description="sequences in one decode batch")
    max_prefill_tokens: int = Field(512, ge=1, description="tokens in one prefill step (chunked prefill)")
    max_encode_tokens: int = Field(4096, ge=1, description="vision tokens in one encode batch")
    max_engine_failures: int = Field(8, ge=1, description="failed engine calls in a row until an instance gives up (chosen)")

    # emulation: no GPU, no weights; times come from a cost model
    emulate: str = Field("", description="GPU class that instances stand for: a100, a800, h100; empty: real engines")
    time_scale: float = Field(1.0, gt=0, le=1000, description="emulated: modelled seconds per real second")
    emulate_tp: int = Field(1, ge=1, le=8, description="emulated: GPUs of one instance; see emulate_encoder_tp")
    emulate_encoder_tp: int = Field(1, ge=1, le=8, description="emulated: GPUs of an instance that only encodes")
    emulate_link: Literal["rdma", "tcp"] = Field("rdma", description="emulated: the network between instances")

    # bounds
    max_waiting: int = Field(1024, ge=1, description="requests waiting in one stage; more are refused")
    max_inflight: int = Field(256, ge=1, description="requests inside one router; more are refused with 503")
    tensor_store_bytes: int = Field(512 << 20, ge=1 << 16, description="leased tensors per instance")
    media_store_bytes: int = Field(256 << 20, ge=1 << 16, description="uploaded media waiting in one preprocess instance")
    max_body_bytes: int = Field(64 << 20, ge=1024, description="largest HTTP body")
    body_store_bytes: int = Field(512 << 20, ge=1024, description="HTTP bodies kept by one router until their first token")
    max_messages: int = Field(512, ge=1)
    max_images: int = Field(32, ge=1, description="images per request")
    max_media_bytes: int = Field(32 << 20, ge=1024, description="largest encoded image")
    max_image_pixels: int = Field(64_000_000, ge=1, description="largest decoded image, read from its header")
    decode_workers: int = Field(0, ge=0, le=256, description="processes that decode images; 0: half of the cores, at most 8")
    decode_memory_bytes: int = Field(2 << 30, ge=128 << 20, description="address space of one of them; 64 Mpx take 1.2 GB")

    # time
    body_timeout_s: float = Field(30.0, gt=0, description="how long the body of a request may take to arrive")
    request_timeout_s: float = Field(120.0, gt=0, description="deadline of a request")
    stream_interval_s: float = Field(0.02, ge=0, le=1, description="least time between two token messages; 0: one per step")
    ping_interval_s: float = Field(10.0, gt=0, description="longest silence in a stream, the wait for its first token included")
    stage_wait_s: float = Field(20.0, ge=0, description="how long a request waits for an absent stage before 503")
    heartbeat_interval_s: float = Field(0.5, gt=0)
    heartbeat_timeout_s: float = Field(3.0, gt=0, description="an instance that is silent this long is lost")
    drain_timeout_s: float = Field(30.0, ge=0, description="how long SIGTERM waits for running work")
    fetch_timeout_s: float = Field(10.0, gt=0, description="whole budget of one media download")
    decode_timeout_s: float = Field(15.0, gt=0, description="CPU time of decoding one image; the largest take 4 s")
    transfer_timeout_s: float = Field(15.0, gt=0, description="one tensor pull; Gloo's own default is 30 minutes")
    cache_ttl_s: float = Field(600.0, ge=1, description="how long the index remembers what nobody says again (chosen)")

    # policy
    policy: str = Field("triptych", description="policy set: how stages are placed, chosen, ordered and cached")
    group: Literal["", "text", "multimodal"] = Field("", description="whose requests it is for at first; empty: anybody's")
    elastic: Literal["off", "advise", "on"] = Field(
        "off", description="whether the scaler does what the policy decides about roles and instances; advise: it only tells"
    )
    elastic_period_s: float = Field(0.0, ge=0, description="time between two decisions; 0: what the policy wants")
    min_instances: int = Field(0, ge=0, description="engine instances that are kept; 0: as many as at the start")
    max_instances: int = Field(0, ge=0, description="engine instances that there may be; 0: as many as at the start")
    profile: str = Field("", description="what `triptych profile` wrote for this model; empty: measurements, and guesses")
    slo_ttft_text_s: float = Field(0.0, ge=0, description="first token of a text request is due; later is refused; 0: never")
    slo_ttft_picture_s: float = Field(0.0, ge=0, description="the same of a request with pictures")
    slo_tbt_s: float = Field(0.0, ge=0, description="target of the mean time between a request's tokens; 0: none")
    transport: Literal["auto", "gloo", "shared_memory"] = Field("auto", description="auto: shared memory where it works")
    max_attempts: int = Field(2, ge=1, le=5, description="tries of a request; each goes on where the last one ended")
    allow_private_media: bool = Field(False, description="let image URLs point at private addresses (tests only)")

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = Field(False, description="JSON logs; default: only when stderr is not a terminal")


def load_settings(**overrides: object) -> Settings:
    """Settings from the environment; overrides (command-line flags, None means not given) win.

    Raises:
        BadRequest: an unknown TRIPTYCH_* variable or a value out of bounds; the message names it.
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    unknown = sorted(key for key in os.environ if key.startswith(PREFIX) and key not in known)
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise BadRequest(
            f"unknown setting {', '.join(unknown)}{hint}; allowed: {', '.join(sorted(known))}", code="unknown_setting"
        )
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        found = [fault for fault in error.errors() if fault["loc"]]
        faults = "; ".join(f"{PREFIX}{str(fault['loc'][0]).upper()}={fault['input']!r}: {fault['msg']}" for fault in found)
        raise BadRequest(f"bad setting: {faults or error}", code="bad_setting") from error
