"""HTML as a tree, so that no text of a report is ever taken for markup, whatever it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

from triptych.shared.units import plain

Child = Element | str


def tag(name: str, /, *children: Child, css: str = "", **attributes: str) -> Element:
    """An element with its text and elements, in order. css: its classes."""
    element = Element(name, {**attributes, "class": css} if css else attributes)
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            element.append(child)
            last = child
        elif last is None:
            element.text = (element.text or "") + plain(child)
        else:
            last.tail = (last.tail or "") + plain(child)
    return element


def table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str = "") -> Element:
    """A table that scrolls sideways when it is wider than the screen."""
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    top = [tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))] if head else []
    return tag("div", tag("table", *top, tag("tbody", *body), css=css), css="scroll")


def document(title: str, style: str, *body: Child) -> str:
    """A whole page that needs nothing but itself."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", style),
    )
    page = tag("html", head, tag("body", tag("main", *body)), lang="en")
    return "<!DOCTYPE html>\n" + tostring(page, encoding="unicode", method="html") + "\n"
