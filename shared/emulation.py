"""What is served when GPUs are emulated: the model by name, its cost model, and the settings that such instances need.

Nothing is downloaded: all emulated models share the small tokenizer and chat template in emulated_model/, which
deploy/emulated/make_tokenizer.py made. `open_model` is how every process finds what is served, real or emulated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from triptych.shared.checkpoint import Checkpoint, ImageOptions, open_checkpoint
from triptych.shared.cost_model.api import CostModel
from triptych.shared.cost_model.images import NativeResolution
from triptych.shared.cost_model.published import published_cost_model
from triptych.shared.cost_model.unknowns import LinkCosts
from triptych.shared.errors import BadRequest
from triptych.shared.instance_info import Emulation
from triptych.shared.messages import Role
from triptych.shared.settings import Settings

FOLDER = Path(__file__).parent / "emulated_model"
IMAGE_TOKEN, END_TOKEN = "<|image_pad|>", "<|im_end|>"
MAX_POSITION_EMBEDDINGS = {  # of each model's config.json
    "qwen2.5-vl-7b": 128_000,
    "llama-3.2-11b": 131_072,
    "internvl2.5-26b": 32_768,
}
ONLY_EMULATED = frozenset(("time_scale", "emulate_tp", "emulate_encoder_tp", "emulate_link"))  # settings
OF_MODELLED_WORK = ("request_timeout_s", "transfer_timeout_s", "stage_wait_s", "drain_timeout_s")  # deadlines
EITHER_TP: tuple[tuple[Role, ...], ...] = ((), ("encoder",))  # instances that encode only have a TP degree of their own
_NO_SIZES = ImageOptions(1, 1, 1, 1, 1 << 40, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # pictures are cut by the cost model's rule


def open_model(settings: Settings) -> Checkpoint:
    """What the cluster serves.

    Raises:
        BadRequest: there is no such checkpoint, or no figures for that model on that GPU.
    """
    return _emulated(settings) if settings.emulate else open_checkpoint(settings.model, settings.model_name)


def _emulated(settings: Settings) -> Checkpoint:
    cost, _ = (cost_model_of(settings, roles) for roles in EITHER_TP)  # both are to be had
    special_ids = {token["content"]: int(token["id"]) for token in _tokenizer()["added_tokens"]}
    longest = MAX_POSITION_EMBEDDINGS[settings.model]
    return Checkpoint(
        path=FOLDER,
        name=settings.model_name or settings.model,
        revision=blake3(f"emulated {settings.model} {special_ids}".encode()).hexdigest(16),
        config={"model_type": "emulated", "vocab_size": 1 + max(special_ids.values())},
        image=cost.images.options if isinstance(cost.images, NativeResolution) else _NO_SIZES,
        max_position_embeddings=longest,
        image_token_id=special_ids[IMAGE_TOKEN],
        eos_token_ids=(special_ids[END_TOKEN],),
        random_weights=True,
        emulation=Emulation(settings.emulate, settings.time_scale),
    )


@lru_cache(maxsize=1)  # many instances of one process read it
def _tokenizer() -> dict[str, Any]:
    tokenizer: dict[str, Any] = json.loads((FOLDER / "tokenizer.json").read_bytes())
    return tokenizer


def word_ids() -> list[int]:
    """Tokens that an emulated model says: English words and beginnings of such, each with the space before it."""
    vocab: dict[str, int] = _tokenizer()["model"]["vocab"]
    space = "\u0120"  # how byte-level BPE writes it
    return sorted(
        id_ for token, id_ in vocab.items() if token.startswith(space) and token[1:].isascii() and token[1:].isalpha()
    )


def cost_model_of(settings: Settings, roles: Sequence[Role] = ()) -> CostModel:
    """Of one instance with these roles.

    Raises:
        BadRequest: no figures for that model or GPU, or it does not fit.
    """
    tp = settings.emulate_encoder_tp if tuple(roles) == ("encoder",) else settings.emulate_tp
    return published_cost_model(settings.emulate, settings.model, tp)


def attends_to_all(settings: Settings) -> bool:
    """Whether text attends to the pictures after it, too: that of models with cross-attention does."""
    return bool(settings.emulate) and cost_model_of(settings).architecture == "CroAttn"


def link_of(settings: Settings) -> LinkCosts:
    """The network link of one instance."""
    unknowns = cost_model_of(settings).unknowns
    return unknowns.tcp if settings.emulate_link == "tcp" else unknowns.rdma


def num_slots(cost: CostModel, num_image_tokens: int) -> int:
    """KV slots that so many image tokens take. In a cross-attention model they take less than text (32 KB instead of 128 KB
    in Llama-3.2-11B): there a picture is placed in the prompt, and counted, by its slots."""
    memory = cost.memory
    if cost.architecture == "DecOnly":
        return num_image_tokens
    return math.ceil(num_image_tokens * memory.kv_bytes_per_image_token / memory.kv_bytes_per_token)


def startup_s(settings: Settings) -> float:
    """Real seconds that the slowest instance takes to start; without emulation 0."""
    if not settings.emulate:
        return 0.0
    return max(cost_model_of(settings, roles).startup_s for roles in EITHER_TP) / settings.time_scale


def check_emulation(settings: Settings) -> None:
    """Settings that contradict each other are refused: what is ignored would be believed to hold.

    Raises:
        BadRequest: in one line.
    """
    given = sorted(ONLY_EMULATED & settings.model_fields_set)
    if given and not settings.emulate:
        raise BadRequest(f"{', '.join(given)}: only for emulated instances, which need `emulate`, too", code="bad_setting")
    if settings.emulate and settings.device == "cuda":
        raise BadRequest("device is cuda, but emulated instances run on none: leave one of them out", code="bad_setting")


def emulated_settings(settings: Settings) -> Settings:
    """What GPU instances need in place of defaults that suit a CPU; what was set stays. Deadlines are real time: where
    modelled time runs slower, they are longer. Without emulation: as they are.

    Raises:
        BadRequest: as check_emulation; no figures for model or GPU; or more KV than fits beside the weights.
    """
    check_emulation(settings)
    if not settings.emulate:
        return settings
    cost = cost_model_of(settings)
    capacity_bytes = cost.memory.kv_capacity_bytes
    if settings.kv_cache_bytes > capacity_bytes:
        raise BadRequest(
            f"kv_cache_bytes is {settings.kv_cache_bytes}, and {cost.name} has {capacity_bytes} beside the weights",
            code="bad_setting",
        )
    slower = max(1.0, 1.0 / settings.time_scale)
    defaults = {
        "kv_cache_bytes": capacity_bytes,
        "tensor_store_bytes": 64 << 30,  # chosen: a share of a host's memory; Azure's ND A100 v4 has 1.9 TB for 8 GPUs
        "embedding_cache_bytes": 4 << 30,  # vLLM's mm_processor_cache_gb, whose pictures take about as much
        "max_num_seqs": 256,  # vLLM's max_num_seqs
        "max_prefill_tokens": 8192,  # vLLM's max_num_batched_tokens
        "max_encode_tokens": num_slots(cost, 16_384),  # chosen: two pictures of Llama-3.2, a dozen of the others
        "max_inflight": 4096,  # chosen: 64 requests for each of 64 instances
        **{name: slower * Settings.model_fields[name].default for name in OF_MODELLED_WORK},
    }
    return settings.model_copy(
        update={name: value for name, value in defaults.items() if name not in settings.model_fields_set}
    )
