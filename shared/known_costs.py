"""What is known of costs before anybody computes: by a profile of the model that is served, or by the emulated GPUs."""

from __future__ import annotations

from pathlib import Path

from triptych.shared.checkpoint import open_checkpoint
from triptych.shared.cost_model.api import CostModel
from triptych.shared.cost_model.profile import read_profile
from triptych.shared.emulation import cost_model_of, link_of
from triptych.shared.errors import BadRequest
from triptych.shared.policies.transfers import Transfers, transfers_of
from triptych.shared.settings import Settings


def profiled(settings: Settings) -> CostModel | None:
    """By the profile that the settings name.

    Raises:
        BadRequest: in one line: it is of another model, or cannot be read, or nothing that is emulated costs what it says.
    """
    if not settings.profile:
        return None
    if settings.emulate:
        raise BadRequest("profile is what was measured here, and emulated instances cost what is published", code="bad_setting")
    if not settings.model:
        raise BadRequest("profile is of a model: which one is served? Set model, too", code="bad_setting")
    profile = read_profile(Path(settings.profile))
    profile.require_model(open_checkpoint(settings.model, settings.model_name).revision)
    return profile.cost_model()


def known_transfers(settings: Settings) -> Transfers:
    """What is to be expected of transfers; a guess where neither is given.

    Raises:
        BadRequest: as `profiled`; no figures for model or GPU.
    """
    if (model := profiled(settings)) is not None:
        return transfers_of(model, model.unknowns.local)
    if settings.emulate:
        return transfers_of(cost_model_of(settings), link_of(settings), settings.time_scale)
    return Transfers()
