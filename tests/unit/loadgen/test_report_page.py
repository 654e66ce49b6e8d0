"""The page is whole by itself, well-formed, and takes no text of a run for markup."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.replay_results import CONDITIONS, answered, failed
from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.report.builder import ReportBuilder
from triptych.loadgen.report.page import page
from triptych.shared.units import plain

VOID = {"meta", "br", "hr", "img", "input", "link"}
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "section", "div", "span", "p", "h1", "h2", "h3", "ul", "li"),
    *("table", "thead", "tbody", "tr", "th", "td", "svg", "line", "polyline", "text"),
}
ATTRIBUTES = {
    *("class", "lang", "charset", "name", "content", "scope", "role"),
    *("viewbox", "points", "x", "y", "dy", "x1", "x2", "y1", "y2"),
}
HOSTILE = (
    "</style><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a & b < c > \"d\" 'e'",
    "\x00\x1b[31m\x07",
    "]]>-->",
)


class Strict(HTMLParser):
    """Every element that begins ends, in order; remembers what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(conditions: Conditions = CONDITIONS) -> str:
    builder = ReportBuilder(conditions)
    for at_s in range(50):
        builder.add(answered(float(at_s), 0.1 + at_s / 100, [0.01] * at_s, num_images=at_s % 4))
        builder.add(failed(float(at_s), f"http_{at_s}"))
    return page(builder.report())


def parsed(text: str) -> Strict:
    parser = Strict()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def test_it_is_well_formed_and_needs_no_other_file() -> None:
    text = page_of()
    found = parsed(text)
    assert found.tags <= TAGS
    assert set(found.attributes) <= ATTRIBUTES
    assert not any("//" in value for values in found.attributes.values() for value in values)
    assert "url(" not in text
    assert "@import" not in text
    charts = [f"<svg{rest.split('</svg>')[0]}</svg>" for rest in text.split("<svg")[1:]]
    assert len(charts) == 7
    for chart in charts:
        assert ElementTree.fromstring(chart).find("title") is not None


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_a_run_stay_texts(text: str) -> None:
    conditions = replace(
        CONDITIONS,
        **dict.fromkeys(("target", "model", "label", "trace", "message"), text),
        versions={text: text},
        options={text: [text]},
        notes=(text,),
        error_examples={"http_1": text},
    )
    found = parsed(page_of(conditions))
    assert found.tags <= TAGS
    assert set(found.attributes) <= ATTRIBUTES
    assert plain(text) in found.texts


@given(st.text())
def test_any_note_is_shown_as_it_is(text: str) -> None:
    conditions = replace(CONDITIONS, notes=(f"note: {text}",))
    found = parsed(page(ReportBuilder(conditions).report()))
    shown = f"note: {plain(text)}".replace("\r\n", "\n").replace("\r", "\n")
    assert shown in [part.replace("\r\n", "\n").replace("\r", "\n") for part in found.texts]
