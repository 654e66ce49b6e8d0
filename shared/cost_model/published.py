"""Cost models of GPU classes: the roofline of a model's dimensions at the efficiencies that gpus.py has.

Checked in the tests against figures that were not fitted: DistServe's and Splitwise's step times, published image times. Not
modelled: steps without any image could skip a CroAttn model's cross-attention layers (a fifth of Llama-3.2-11B).
"""

from __future__ import annotations

from dataclasses import replace

from triptych.shared.cost_model.api import CostModel
from triptych.shared.cost_model.forms import MemoryCosts, PassCosts, PreprocessCosts
from triptych.shared.cost_model.gpus import GPUS, Gpu
from triptych.shared.cost_model.models import BYTES_PER_VALUE, MODELS, TextTower, VisionLanguageModel, VisionTower
from triptych.shared.cost_model.unknowns import LinkCosts, Unknowns
from triptych.shared.errors import BadRequest

TP_DEGREES = (1, 2, 4, 8)  # inside one node of eight
# Measured with Triptych's own decoder, JPEG to resized pixels: 6 ms for 0.1 Mpx, 69 ms for 1.2 Mpx (docs/decisions.md,
# "Pictures are decoded in worker processes"). A Qwen2.5-VL-7B image of 2.1 Mpx on H100 comes to 164 ms with its encoding;
# 167 ms were measured elsewhere.
PREPROCESS = PreprocessCosts(fixed_s=0.001, pixel_s=57e-9)
DEFAULT_UNKNOWNS = Unknowns()


def published_cost_model(gpu: str, model: str, tp: int = 1, unknowns: Unknowns = DEFAULT_UNKNOWNS) -> CostModel:
    """The cost model of one instance on `tp` GPUs.

    Args:
        gpu: one of GPUS.
        model: one of MODELS.

    Raises:
        BadRequest: unknown names, or the model cannot be cut that way or doesn't fit; one line that says what can be had.
    """
    if gpu not in GPUS:
        raise BadRequest(f"no figures for GPU {gpu!r}; there are {', '.join(GPUS)}", code="bad_setting")
    if model not in MODELS:
        raise BadRequest(f"no figures for model {model!r}; there are {', '.join(MODELS)}", code="bad_setting")
    return derived_cost_model(GPUS[gpu], MODELS[model], tp, unknowns)


def derived_cost_model(gpu: Gpu, model: VisionLanguageModel, tp: int, unknowns: Unknowns) -> CostModel:
    """As published_cost_model, for dimensions of one's own."""
    text = model.text
    if tp not in TP_DEGREES or text.num_heads % tp:
        raise BadRequest(f"{model.name} cannot run at TP {tp}", code="bad_setting")
    memory = _memory(gpu, model, tp, unknowns)
    if memory.kv_capacity_bytes <= 0:
        raise BadRequest(f"{model.name} does not fit on {tp} x {gpu.name}", code="bad_setting")
    step = text_costs(gpu, text, tp, unknowns.step_overhead_s)
    return CostModel(
        name=f"{model.name} on {tp} x {gpu.name}",
        source="published",
        architecture="CroAttn" if text.num_cross_layers else "DecOnly",
        tp=tp,
        images=model.images,
        preprocess=PREPROCESS,
        encode=vision_costs(gpu, model.vision, tp, unknowns),
        prefill=step,
        decode=step,
        memory=memory,
        unknowns=replace(unknowns, local=LinkCosts(unknowns.local.latency_s, gpu.local_bytes_per_s)),
        image_kv_share=text.num_cross_layers * text.kv_params_per_layer / text.params_per_token,
    )


def text_costs(gpu: Gpu, text: TextTower, tp: int, overhead_s: float) -> PassCosts:
    """One step of the language model, prefill and decode alike."""
    flops_per_s = tp * gpu.peak_flops * gpu.linear_mfu
    reduce_s, reduce_token_s = _all_reduces(gpu, tp, 2 * text.num_layers, text.hidden_size)
    token_s = 2 * text.params_per_token / flops_per_s + reduce_token_s
    weight_bytes = BYTES_PER_VALUE * (text.params_per_token + text.head_params)
    weights_s = weight_bytes / (tp * gpu.memory_bytes_per_s * gpu.weights_efficiency)
    kv_bytes_per_token = text.num_self_layers * text.kv_bytes_per_layer
    return PassCosts(
        fixed_s=overhead_s + text.num_layers * gpu.layer_s + reduce_s,
        token_s=token_s,
        knee_tokens=weights_s / token_s,
        sequence_s=2 * text.head_params / flops_per_s,
        pair_s=text.flops_per_pair / (tp * gpu.peak_flops * gpu.attention_mfu),
        context_s=kv_bytes_per_token / (tp * gpu.memory_bytes_per_s * gpu.kv_efficiency),
    )


def vision_costs(gpu: Gpu, vision: VisionTower, tp: int, unknowns: Unknowns) -> PassCosts:
    """One batch of the vision tower; tokens are patches."""
    flops_per_s = gpu.peak_flops * unknowns.vit_mfu
    share = unknowns.encode_serial_share + (1 - unknowns.encode_serial_share) / tp
    reduce_s, reduce_token_s = _all_reduces(gpu, tp, 2 * vision.num_layers, vision.hidden_size)
    token_s = share * vision.flops_per_patch / flops_per_s + reduce_token_s
    weights_s = BYTES_PER_VALUE * vision.num_params / (tp * gpu.memory_bytes_per_s * gpu.weights_efficiency)
    return PassCosts(
        fixed_s=unknowns.encode_overhead_s + vision.num_layers * gpu.layer_s + reduce_s,
        token_s=token_s,
        knee_tokens=weights_s / token_s,
        pair_s=share * vision.flops_per_pair / flops_per_s,
    )


def _all_reduces(gpu: Gpu, tp: int, num_per_pass: int, hidden_size: int) -> tuple[float, float]:
    """Seconds per pass, and per token of it."""
    if tp == 1:
        return 0.0, 0.0
    token_bytes = BYTES_PER_VALUE * hidden_size
    token_s = 2 * (tp - 1) / tp * token_bytes / gpu.all_reduce_bytes_per_s
    return num_per_pass * gpu.all_reduce_s, num_per_pass * token_s


def _memory(gpu: Gpu, model: VisionLanguageModel, tp: int, unknowns: Unknowns) -> MemoryCosts:
    text = model.text
    usable = int(tp * gpu.memory_bytes * unknowns.memory_utilization)
    return MemoryCosts(
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=text.num_self_layers * text.kv_bytes_per_layer,
        kv_bytes_per_image_token=text.num_cross_layers * text.kv_bytes_per_layer,
        embedding_bytes_per_token=BYTES_PER_VALUE * text.hidden_size,
        kv_capacity_bytes=usable - model.weight_bytes,
    )
