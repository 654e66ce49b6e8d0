"""What the settings say about elasticity: checked at start, in one line, and what work costs by a cost model."""

from __future__ import annotations

from dataclasses import replace

from triptych.shared.emulation import cost_model_of, link_of
from triptych.shared.errors import BadRequest
from triptych.shared.known_costs import profiled
from triptych.shared.policies.elastic.costs import costs_of
from triptych.shared.policies.elastic.views import ElasticCosts
from triptych.shared.policies.policy_set import FIXED, policy_set
from triptych.shared.settings import Settings

ONLY_ELASTIC = frozenset(("elastic_period_s", "min_instances", "max_instances"))  # settings


def check_elastic(settings: Settings, num_instances: int | None = None) -> None:
    """Before anything is started.

    Args:
        num_instances: engine instances that are started at first; None: not known here.

    Raises:
        BadRequest: in one line: settings that contradict each other, an unknown policy, a profile of another model.
    """
    elasticity = policy_set(settings.policy).elasticity
    given = sorted(ONLY_ELASTIC & settings.model_fields_set)
    if elasticity == FIXED and (given or settings.elastic != "off"):
        useless = ", ".join(given or ["elastic"])
        raise BadRequest(f"policy {settings.policy} keeps all instances as they are: leave out {useless}", code="bad_setting")
    if given and settings.elastic == "off":
        raise BadRequest(f"{', '.join(given)}: only for elastic clusters, set elastic to on or advise, too", code="bad_setting")
    least, most = settings.min_instances, settings.max_instances or num_instances
    if most is not None and 0 < most < least:
        raise BadRequest(f"min_instances is {least}, and max_instances {most}: the first may not be more", code="bad_setting")
    if num_instances is not None and settings.max_instances and num_instances > settings.max_instances:
        raise BadRequest(
            f"max_instances is {settings.max_instances}, and {num_instances} are started: start fewer, or allow more",
            code="bad_setting",
        )
    if not elasticity.scales and (settings.min_instances or num_instances) != (settings.max_instances or num_instances):
        reason = f"policy {settings.policy} changes roles and starts or ends no instances"
        raise BadRequest(f"{reason}: leave out min_instances and max_instances", code="bad_setting")
    known_costs(settings)


def with_limits(settings: Settings, num_instances: int) -> Settings:
    """Limits that were left out, in words: a scaler that is started again would take those that it finds for the first ones."""
    if settings.elastic == "off":
        return settings
    limits = {name: getattr(settings, name) or num_instances for name in ("min_instances", "max_instances")}
    return settings.model_copy(update=limits)


def known_costs(settings: Settings) -> ElasticCosts | None:
    """By the cost model of the emulated GPUs, or by the profile; None: only what instances measure tells.

    Raises:
        BadRequest: in one line: no figures, or a profile of another model.
    """
    if (model := profiled(settings)) is not None:
        return costs_of(model, model.unknowns.local, settings.slo_tbt_s)
    if not settings.emulate:
        return None
    text, image = (
        costs_of(cost_model_of(settings, roles), link_of(settings), settings.slo_tbt_s) for roles in ((), ("encoder",))
    )
    return replace(text, encode=image.encode, capacity={**text.capacity, "encoder": image.capacity["encoder"]})
