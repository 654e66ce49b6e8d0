"""A workload as somebody wants it: at another rate, with another share of pictures, longer, steady."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from triptych.loadgen.synth.arrivals import mean_rate
from triptych.loadgen.synth.workload import Workload
from triptych.loadgen.traces.trace import TraceError


@dataclass(frozen=True, slots=True)
class Wishes:
    """None: as the workload says. rate_per_s: of all clients, the mean over the duration. image_share: of the requests.

    is_steady: no hours, swings, surges or bursts; the gaps keep their CV.
    """

    duration_s: float | None = None
    rate_per_s: float | None = None
    image_share: float | None = None
    seed: int | None = None
    is_steady: bool = False


def as_wished(workload: Workload, wishes: Wishes) -> Workload:
    """Raises TraceError where there is nothing to scale."""
    workload = _with_same_rates(workload, wishes)
    image, text = (
        sum(mean_rate(client, workload) for client in workload.client if (client.images is not None) is has_images)
        for has_images in (True, False)
    )
    if not image + text:
        raise TraceError("the workload's clients send nothing in its duration")
    rate = image + text if wishes.rate_per_s is None else wishes.rate_per_s
    share = image / (image + text) if wishes.image_share is None else wishes.image_share
    if (share > 0 and not image) or (share < 1 and not text):
        raise TraceError(f"an image share of {share:g} needs clients of both kinds, the workload has one")
    factors = {True: rate * share / image if image else 0.0, False: rate * (1 - share) / text if text else 0.0}
    clients = tuple(
        replace(client, rate_per_s=client.rate_per_s * factor)
        for client in workload.client
        if (factor := factors[client.images is not None]) > 0
    )
    return replace(workload, client=clients)


def _with_same_rates(workload: Workload, wishes: Wishes) -> Workload:
    clients = workload.client
    if wishes.is_steady:
        clients = tuple(replace(client, hours=None, swing=0.0, surge=0.0, burst=()) for client in clients)
    return replace(
        workload,
        client=clients,
        duration_s=workload.duration_s if wishes.duration_s is None else wishes.duration_s,
        seed=workload.seed if wishes.seed is None else wishes.seed,
    )
