"""How many instances the work of each stage fills: measured token rates over what one instance does (M_L / M_C)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from triptych.shared.messages import Role
from triptych.shared.policies.elastic.views import ClusterView, ElasticCosts, GroupDemand, Rates
from triptych.shared.policies.groups import ANY, MULTIMODAL, TEXT, Group

STAGES: tuple[Role, ...] = ("encoder", "prefill", "decode")
MIN_ATTAINMENT = 0.99  # ModServe's (arXiv 2502.00937)
MIN_ENDED = 20  # chosen: attainment of fewer requests says nothing
NEGLIGIBLE_PER_S = 1e-6  # chosen: what averages keep of long ago, and too little to divide by
STAGES_OF: Mapping[Group, tuple[Role, ...]] = {TEXT: ("prefill", "decode"), MULTIMODAL: STAGES}


def tokens_per_s(rates: Rates, costs: ElasticCosts) -> dict[Role, float]:
    """M_L of each stage: image tokens, prompt tokens as prefill counts them, output tokens."""
    return {
        "encoder": rates.image_tokens,
        "prefill": rates.text_tokens + costs.image_weight * rates.image_tokens,
        "decode": rates.output_tokens,
    }


def needed(rates: Rates, costs: ElasticCosts) -> dict[Role, float]:
    """M_L / M_C by stage: the instances that this work keeps busy."""
    return {role: load / costs.capacity[role] for role, load in tokens_per_s(rates, costs).items()}


def average(demand: GroupDemand) -> Rates:
    """What it was, over minutes."""
    return demand.average


def ahead(seconds: float) -> Callable[[GroupDemand], Rates]:
    """What it will be in so many seconds if it goes on growing as it does."""

    def which(demand: GroupDemand) -> Rates:
        return Rates(*(getattr(demand.now, name) + seconds * getattr(demand.growth, name) for name in Rates.__slots__))

    return which


def recent(demand: GroupDemand) -> Rates:
    """What it was in the last seconds."""
    return demand.recent


def expected(demand: GroupDemand) -> Rates:
    """What is to be expected soon: the higher of average and last rates, with pictures by the most images per request of late.
    Bursts of pictures are bursts of images per request more than of requests, so that a predictor which only looks at
    requests misses them (ModServe, arXiv 2502.00937: by 79 %)."""
    average, recent = demand.average, demand.recent
    requests = max(average.requests, recent.requests)
    images = max(recent.images, requests * demand.peak_images_per_request)
    tokens_per_image = average.image_tokens / average.images if average.images > NEGLIGIBLE_PER_S else 0.0
    return replace(
        average,
        requests=requests,
        text_tokens=max(average.text_tokens, recent.text_tokens),
        images=images,
        image_tokens=max(recent.image_tokens, images * tokens_per_image),
        output_tokens=max(average.output_tokens, recent.output_tokens),
    )


def rates_of(view: ClusterView, group: Group, which: Callable[[GroupDemand], Rates] = average) -> Rates:
    """Of the requests that go to a group of instances; to those of no group, all."""
    rates = [which(demand) for name, demand in view.demand.items() if group in (name, ANY)]
    return Rates(*(sum(getattr(rate, name) for rate in rates) for name in Rates.__slots__))


def are_late(demand: GroupDemand, min_attainment: float = MIN_ATTAINMENT) -> bool:
    """Whether too few of the requests that ended lately were in time."""
    return demand.attainment is not None and demand.num_ended >= MIN_ENDED and demand.attainment < min_attainment
