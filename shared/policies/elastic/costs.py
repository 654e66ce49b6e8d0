"""What work costs on one instance, for elastic decisions: from a cost model, or from what instances measure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from triptych.shared.cost_model.api import CostModel, DecodeBatch
from triptych.shared.cost_model.derived import TypicalRequest, images_of, isolated_slo, max_decode_batch, prompt_of
from triptych.shared.cost_model.forms import PassCosts
from triptych.shared.cost_model.unknowns import LinkCosts, Unknowns
from triptych.shared.messages import Role
from triptych.shared.policies.elastic.views import ElasticCosts, ElasticInstance
from triptych.shared.policies.pace import FIRST_TOKENS_PER_S
from triptych.shared.policies.routing import KV_COSTS, TransferCosts

# Medians of the Azure LMM trace, and an image of the papers' size.
TYPICAL = TypicalRequest(num_text_tokens=800, num_output_tokens=100, num_images=1, image_width=896, image_height=896)
SLO_FACTOR = 5.0  # both papers scale isolated latencies; 5 is in the middle of what they sweep
COMPUTING: tuple[Role, ...] = ("encoder", "prefill")
MEASURED_BATCH = 16  # chosen: so many sequences of small models on a CPU decode in about the time of one


def costs_of(model: CostModel, link: LinkCosts, tbt_s: float = 0.0, request: TypicalRequest = TYPICAL) -> ElasticCosts:
    """From a cost model, published or measured.

    Args:
        tbt_s: target of the time between tokens; 0: SLO_FACTOR times what the request has alone.
        request: what is served, with at least one picture, for the sizes of prompts and pictures.
    """
    tbt_s = tbt_s or isolated_slo(model, request, SLO_FACTOR).tbt_s
    prompt, images = prompt_of(model, request), images_of(model, request)
    batch = max(1, max_decode_batch(model, prompt, tbt_s))
    decode_s = model.decode_s(DecodeBatch(batch, batch * prompt.num_tokens, batch * prompt.num_image_tokens))
    num_slots = sum(_num_slots(model, image.num_tokens) for image in images)
    kv_tokens = sum(image.num_tokens for image in images) * model.image_kv_share  # CroAttn: prefill makes their KV, no more
    return ElasticCosts(
        encode=_encode_costs(model, request),
        prefill=model.prefill,
        decode=model.decode,
        capacity={
            "encoder": num_slots / model.encode_s(images),
            "prefill": prompt.num_tokens / model.prefill_s([prompt]),
            "decode": batch / decode_s,
        },
        image_weight=1.0 if model.architecture == "DecOnly" else kv_tokens / num_slots,
        kv=TransferCosts(link.latency_s, model.memory.kv_bytes_per_token / link.bytes_per_s),
        tbt_s=tbt_s,
        role_switch_s=model.role_switch_s,
        startup_s=model.startup_s,
    )


def measured_costs(instances: Sequence[ElasticInstance], known: ElasticCosts | None = None) -> ElasticCosts:
    """Without a cost model: tokens take as long as they lately did, whatever the batch, and decode steps as long as now.
    known: what it was before; what nobody measures now stays."""
    encoder, prefill = (_tokens_per_s(instances, role, known) for role in COMPUTING)
    steps_s = [
        load.num_running / load.tokens_per_s
        for load in (instance.load("decode") for instance in instances)
        if load.num_running and load.tokens_per_s > 0
    ]
    step_s = statistics.median(steps_s) if steps_s else known.decode.fixed_s if known else 1 / FIRST_TOKENS_PER_S
    return ElasticCosts(
        encode=PassCosts(0.0, 1 / encoder),
        prefill=PassCosts(0.0, 1 / prefill),
        decode=PassCosts(step_s, 0.0),
        capacity={"encoder": encoder, "prefill": prefill, "decode": MEASURED_BATCH / step_s},
        image_weight=1.0,
        kv=KV_COSTS,
        tbt_s=0.0,
        role_switch_s=Unknowns().role_switch_s,
        startup_s=Unknowns().process_start_s,
    )


def _encode_costs(model: CostModel, request: TypicalRequest) -> PassCosts:
    """By image tokens, of pictures like those of the request."""
    image = model.image(request.image_width, request.image_height)
    costs, num_slots = model.encode, _num_slots(model, image.num_tokens)
    patches = image.num_patches / num_slots
    return PassCosts(
        fixed_s=costs.fixed_s,
        token_s=costs.token_s * patches + (costs.pair_s * image.num_pairs + costs.sequence_s) / num_slots,
        knee_tokens=costs.knee_tokens / patches,
    )


def _num_slots(model: CostModel, num_image_tokens: int) -> float:
    """Image tokens count by the KV slots that they take (shared/emulation.py)."""
    memory = model.memory
    per_token = 1.0 if model.architecture == "DecOnly" else memory.kv_bytes_per_image_token / memory.kv_bytes_per_token
    return num_image_tokens * per_token


def _tokens_per_s(instances: Sequence[ElasticInstance], role: Role, known: ElasticCosts | None) -> float:
    measured = [load.tokens_per_s for load in (one.load(role) for one in instances) if load.tokens_per_s > 0]
    if measured:
        return statistics.median(measured)
    return known.capacity[role] if known else FIRST_TOKENS_PER_S
