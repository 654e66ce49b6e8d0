"""The report as one HTML page that needs no network and no script: key figures, charts, tables, conditions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import get_args
from xml.etree.ElementTree import Element

from triptych.loadgen.report.figures import (
    LATENCIES,
    SLOS,
    SPREAD,
    Latency,
    SloKind,
    flat_conditions,
    num_failed,
    of_known,
    part,
)
from triptych.loadgen.report.markup import document, table, tag
from triptych.loadgen.report.page_charts import charts
from triptych.loadgen.report.schema import ClassFigures, CurveFigure, Distribution, Report
from triptych.loadgen.report.style import STYLE
from triptych.shared.units import duration, number, share

TABLES = "grid tables"


def page(report: Report) -> str:
    """The whole page."""
    classes = report.classes
    return document(
        f"{report.headline} ({report.label})",
        STYLE,
        *_head(report),
        tag("section", *_key_figures(classes[0]), css="cards"),
        *_section("Over the run, and by percentile", charts(report)),
        *_section("Latency", (_latency_card(latency, classes) for latency in LATENCIES if latency.of(classes[0])), TABLES),
        *_section("Service level objectives", (_slo_card(slo, classes) for slo in SLOS if slo.of(classes[0])), TABLES),
        *_section("Load", [_load_card(report)], css=""),
        *_section("Sending, and failures", _sending_cards(report), TABLES),
        *_section("Conditions", [_card("", table((), flat_conditions(report.conditions), css="pairs"))], css=""),
    )


def _section(title: str, cards: Iterable[Element], css: str = "grid") -> Iterator[Element]:
    shown = list(cards)
    if shown:
        yield tag("h2", title)
        yield tag("section", *shown, css=css)


def _card(title: str, body: Element, note: str = "") -> Element:
    head = [tag("h3", title)] if title else []
    return tag("div", *head, *([tag("p", note, css="soft")] if note else []), body, css="card")


def _head(report: Report) -> Iterator[Element]:
    yield tag("h1", report.headline)
    yield tag("p", f"{duration(report.span_s)}, {report.origin}", css="soft")
    if not report.is_real:
        yield tag("p", f"{report.label}: no figure here is of real hardware", css="label")
    if report.warnings:
        yield tag("ul", *(tag("li", warning) for warning in report.warnings), css="warnings")


def _key_figures(whole: ClassFigures) -> Iterator[Element]:
    shown = [("requests", number(whole.num_requests), f"{number(num_failed(whole))} failed")]
    for latency in LATENCIES:
        found = latency.of(whole)
        if found is not None and latency.field in get_args(CurveFigure):
            shown.append((f"{latency.title} p99", duration(found.p99), f"p50 {duration(found.p50)}"))
    shown.append(("output tokens/s", number(whole.output_tokens_per_s), f"{number(whole.finished_per_s)} requests/s"))
    shown.append(("prompt tokens cached", share(whole.cache_use), f"of {number(whole.num_prompt_tokens)}"))
    for slo in SLOS:
        met = slo.of(whole)
        if met is not None:
            shown.append((slo.title, share(met.met), f"goodput {number(met.goodput_per_s)} requests/s"))
    if whole.num_answers_known:
        right = share(whole.num_answers_right / whole.num_answers_known)
        shown.append(("answers right", right, f"of {number(whole.num_answers_known)} known"))
    for title, value, note in shown:
        lines = (tag("div", title, css="soft"), tag("div", value, css="value"), tag("div", note, css="soft"))
        yield tag("div", *lines, css="card")


def _latency_card(latency: Latency, classes: Sequence[ClassFigures]) -> Element:
    rows = [(figures.name, *_spread(latency.of(figures))) for figures in classes]
    return _card(latency.title, table(("", *SPREAD), rows), latency.meaning)


def _spread(found: Distribution | None) -> list[str]:
    return [duration(part(found, name)) for name in SPREAD]


def _slo_card(slo: SloKind, classes: Sequence[ClassFigures]) -> Element:
    rows = [
        (
            figures.name,
            share(met.met),
            share(met.met_ttft),
            share(met.met_tbt),
            number(met.goodput_per_s),
            number(met.num_requests),
        )
        for figures in classes
        if (met := slo.of(figures)) is not None
    ]
    return _card(slo.title, table(("", "met", "TTFT", "TBT", "goodput/s", "requests"), rows), slo.meaning)


def _load_card(report: Report) -> Element:
    head = ("", "requests", "finished", "failed", "cancelled", "unfinished", "offered/s", "finished/s")
    tokens = ("prompt tokens/s", "output tokens/s", "cached", "answers right")
    rows = [
        (
            figures.name,
            *map(number, (figures.num_requests, figures.num_finished, num_failed(figures))),
            *map(number, (figures.num_cancelled, figures.num_unfinished)),
            *map(number, (figures.offered_per_s, figures.finished_per_s)),
            *map(number, (figures.prompt_tokens_per_s, figures.output_tokens_per_s)),
            share(figures.cache_use),
            of_known(figures),
        )
        for figures in report.every_class
    ]
    return _card("", table((*head, *tokens), rows))


def _sending_cards(report: Report) -> Iterator[Element]:
    if report.send_lag_s is not None:
        lag = [*zip(SPREAD, _spread(report.send_lag_s), strict=True)]
        yield _card("Send lag", table((), lag, css="pairs"), "sent after the scheduled time, by this client")
    errors = report.classes[0].errors
    if errors:
        examples = report.conditions.get("error_examples", {})
        rows = [(kind, number(count), str(examples.get(kind, ""))) for kind, count in errors.items()]
        yield _card("Failures by kind", table((), rows, css="pairs"), "how many, and what the first of them said")
