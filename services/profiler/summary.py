"""What a profile says, for people as tables and for programs as one JSON document."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from triptych.shared.cost_model.derived import Derived, TypicalRequest
from triptych.shared.cost_model.profile import Profile, StageProfile
from triptych.shared.units import duration, number

# The promise: predictions of held-out passes are this good (relative errors) on a machine that does nothing else.
MAX_MEDIAN_ERROR = 0.15
MAX_P95_ERROR = 0.30
UNITS = {"preprocess": "pixel", "encode": "patch", "prefill": "token", "decode": "token"}


def is_good(stage: StageProfile) -> bool:
    """The fit keeps the promise."""
    return stage.error.median <= MAX_MEDIAN_ERROR and stage.error.p95 <= MAX_P95_ERROR


def warnings(profile: Profile) -> list[str]:
    """A line for each stage whose costs should not be relied on."""
    return [
        f"{name}: held-out passes are predicted with errors of {stage.error.median:.0%} (median) and {stage.error.p95:.0%} "
        f"(95 %), more than {MAX_MEDIAN_ERROR:.0%} and {MAX_P95_ERROR:.0%}: was the machine busy with other things?"
        for name, stage in profile.stages()
        if not is_good(stage)
    ]


def as_json(profile: Profile, request: TypicalRequest, derived: Derived) -> dict[str, object]:
    """All but the single passes, which are in the file."""
    fits = {
        name: {"costs": asdict(stage.costs), "held_out_error": asdict(stage.error), "is_good": is_good(stage)}
        for name, stage in profile.stages()
    }
    return {
        "machine": asdict(profile.machine),
        "model": {"name": profile.model.name, "revision": profile.model.revision},
        "measured_at": profile.measured_at,
        "stages": fits,
        "memory": asdict(profile.memory),
        "link": asdict(profile.link),
        "typical_request": asdict(request),
        "derived": asdict(derived),
    }


def print_summary(profile: Profile, request: TypicalRequest, derived: Derived, console: Console) -> None:
    """Costs with their errors, then what follows from them."""
    console.print(f"{profile.model.name} on {profile.machine}, {profile.measured_at}", markup=False, highlight=False)
    console.print(_cost_table(profile))
    link = f"{duration(profile.link.latency_s)} and {number(profile.link.bytes_per_s / 1e9)} GB/s"
    console.print(f"KV to another instance here: {link}, messages not included", markup=False, highlight=False)
    console.print(_derived_table(request, derived))


def _cost_table(profile: Profile) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("stage", no_wrap=True)
    measured = ("a pass", "of many", "a token", "knee", "a sequence", "1000 of context", "1M pairs")
    for name in (*measured, "passes", "error", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, stage in profile.stages():
        costs = stage.costs
        table.add_row(
            name,
            duration(costs.fixed_s),
            duration(costs.many_s),
            f"{duration(costs.token_s)} ({UNITS[name]})",
            f"{costs.knee_tokens:.0f}",
            *(duration(cost_s) for cost_s in (costs.sequence_s, 1e3 * costs.context_s, 1e6 * costs.pair_s)),
            str(len(stage.points)),
            f"{stage.error.median:.1%}",
            f"{stage.error.p95:.1%}",
        )
    return table


def _derived_table(request: TypicalRequest, derived: Derived) -> Table:
    slo, picture = derived.slo, f"{request.image_width}x{request.image_height}"
    rows = {
        "tipping point, prefill": f"{derived.tipping_point_tokens:.0f} tokens",
        "largest prefill step": f"{derived.max_prefill_tokens} tokens",
        "largest decode batch": f"{derived.max_decode_batch} sequences",
        "largest encode batch": f"{derived.image.batch} pictures",
        "capacity of an image instance": f"{derived.image.tokens_per_s:,.0f} image tokens/s",
        "capacity of a text instance": f"{derived.text.tokens_per_s:,.0f} tokens/s, batch {derived.text.batch}",
    }
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(f"within TTFT {duration(slo.ttft_s)}, TBT {duration(slo.tbt_s)}", no_wrap=True)
    table.add_column(
        f"({request.num_text_tokens} tokens and {request.num_images} of {picture}, {request.num_output_tokens} out)",
        justify="right",
        no_wrap=True,
    )
    for name, value in rows.items():
        table.add_row(name, value)
    return table
