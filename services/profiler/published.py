"""What follows from published figures: each TP degree of a model on a GPU class, and the one to choose. Nothing is measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.table import Table

from triptych.shared.console import table_console
from triptych.shared.cost_model.api import CostModel
from triptych.shared.cost_model.derived import (
    Capacity,
    Derived,
    Slo,
    TypicalRequest,
    choose_tp,
    derive,
    image_capacity,
    isolated_slo,
    text_capacity,
)
from triptych.shared.cost_model.published import TP_DEGREES, published_cost_model
from triptych.shared.errors import BadRequest
from triptych.shared.units import duration


@dataclass(frozen=True, slots=True)
class TpChoice:
    """slo: that of a typical request on the smallest instance. The chosen TP degrees have most throughput per GPU within it;
    None: no degree is in time."""

    slo: Slo
    by_tp: tuple[tuple[CostModel, Derived], ...]
    image_tp: int | None
    text_tp: int | None


def choose(gpu: str, model: str, request: TypicalRequest, slo_factor: float) -> TpChoice:
    """Every degree that the model can be cut into and fits on.

    Raises:
        BadRequest: there are no figures for the GPU or the model.
    """
    models = _fitting(gpu, model)
    slo = isolated_slo(models[0], request, slo_factor)

    def best_tp(capacity: Callable[[CostModel, TypicalRequest, Slo], Capacity]) -> int | None:
        best = choose_tp(models, lambda costs: capacity(costs, request, slo))
        return best.tp if best else None

    by_tp = tuple((costs, derive(costs, request, slo)) for costs in models)
    return TpChoice(slo, by_tp, best_tp(image_capacity), best_tp(text_capacity))


def tell_published(choice: TpChoice, request: TypicalRequest, is_json: bool) -> None:
    """On stdout, and said to be emulated."""
    if is_json:
        by_tp = {str(costs.tp): {"name": costs.name, **asdict(derived)} for costs, derived in choice.by_tp}
        chosen = {"image": choice.image_tp, "text": choice.text_tp}
        document = {
            "emulated": True,
            "typical_request": asdict(request),
            "slo": asdict(choice.slo),
            "tp": by_tp,
            "chosen_tp": chosen,
        }
        sys.stdout.write(json.dumps(document) + "\n")
        return
    console = table_console()
    slo = f"TTFT {duration(choice.slo.ttft_s)}, TBT {duration(choice.slo.tbt_s)}"
    console.print(f"emulated: from published figures, nothing was measured; within {slo}", markup=False, highlight=False)
    console.print(_table(choice))


def _fitting(gpu: str, model: str) -> list[CostModel]:
    found: list[CostModel] = []
    refused: list[BadRequest] = []
    for tp in TP_DEGREES:
        try:
            found.append(published_cost_model(gpu, model, tp))
        except BadRequest as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return found


def _table(choice: TpChoice) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("instance", no_wrap=True)
    for name in ("tipping point", "prefill step", "decode batch", "encode batch", "image tokens/s/GPU", "text tokens/s/GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for costs, derived in choice.by_tp:
        table.add_row(
            costs.name,
            f"{derived.tipping_point_tokens:.0f}",
            f"{derived.max_prefill_tokens}",
            f"{derived.max_decode_batch}",
            f"{derived.image.batch}",
            _rate(derived.image, costs.tp, choice.image_tp),
            _rate(derived.text, costs.tp, choice.text_tp),
        )
    return table


def _rate(capacity: Capacity, tp: int, chosen_tp: int | None) -> str:
    return f"{'chosen ' if tp == chosen_tp else ''}{capacity.tokens_per_s / tp:,.0f}"
