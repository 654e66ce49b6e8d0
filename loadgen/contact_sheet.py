"""Examples of the world on one sheet, each with its question and the right answer: what `loadgen draw` shows."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator

from PIL import Image, ImageDraw, ImageFont, ImageOps

from triptych.loadgen.world import ADVERTISED, MANY_PICTURES, ONE_PICTURE, TASKS, Example, generator, make_example

NUM_COLUMNS = 6
COLUMNS_OF_MANY = 3  # an example with several pictures is as wide as three with one
ONE_IN = 4  # examples has several pictures
# Pixels
PICTURE = 184  # larger ones are scaled down
GAP = 16  # between cards
PAD = 10  # inside a card
COLUMN = PICTURE + 2 * PAD + GAP
FONT, LINE = 14, 19
CHARS_PER_COLUMN = 27  # of this font, in PICTURE; measured
SHEET, CARD, EDGE, INK, RIGHT = "#e9ecef", "white", "#ced4da", "#343a40", "#2b7a3d"


def draw_sheet(count: int, seed: int) -> Image.Image:
    """`count` examples, the advertised tasks in turn; those with several pictures last."""
    rows = [_draw_row(row) for row in _rows(examples(count, seed))]
    sheet = Image.new("RGB", (NUM_COLUMNS * COLUMN + GAP, sum(row.height + GAP for row in rows) + GAP), SHEET)
    top = GAP
    for row in rows:
        sheet.paste(row, (GAP, top))
        top += row.height + GAP
    return sheet


def examples(count: int, seed: int) -> Iterator[Example]:
    """`count` examples, one in ONE_IN of them about several pictures."""
    num_many = count // ONE_IN
    for tasks, number in ((ONE_PICTURE, count - num_many), (MANY_PICTURES, num_many)):
        advertised = itertools.cycle(task for task in tasks if task in ADVERTISED)
        for index, task in enumerate(itertools.islice(advertised, number)):
            yield make_example(task, generator(seed, TASKS.index(task), index))


def _num_columns(example: Example) -> int:
    return 1 if len(example.pictures) == 1 else COLUMNS_OF_MANY


def _rows(shown: Iterable[Example]) -> list[list[Example]]:
    rows: list[list[Example]] = [[]]
    for example in shown:
        if sum(map(_num_columns, rows[-1])) + _num_columns(example) > NUM_COLUMNS:
            rows.append([])
        rows[-1].append(example)
    return rows


def _draw_row(row: list[Example]) -> Image.Image:
    """Cards of equal height side by side."""
    texts = [_wrap(example) for example in row]
    height = PICTURE + max(map(len, texts)) * LINE + 3 * PAD
    image = Image.new("RGB", (NUM_COLUMNS * COLUMN - GAP, height), SHEET)
    left = 0
    for example, lines in zip(row, texts, strict=True):
        width = _num_columns(example) * COLUMN - GAP
        image.paste(_draw_card(example, lines, (width, height)), (left, 0))
        left += width + GAP
    return image


def _wrap(example: Example) -> list[tuple[str, str]]:
    """Lines of text and their colours."""
    chars = CHARS_PER_COLUMN * _num_columns(example)
    question, answer = (textwrap.wrap(text, chars) for text in (example.question.text, example.question.answer))
    return [(line, INK) for line in question] + [(line, RIGHT) for line in answer]


def _draw_card(example: Example, lines: list[tuple[str, str]], size: tuple[int, int]) -> Image.Image:
    """Pictures side by side, the text below them."""
    card = Image.new("RGB", size, CARD)
    draw = ImageDraw.Draw(card)
    draw.rectangle((0, 0, card.width - 1, card.height - 1), outline=EDGE)
    slot = card.width / len(example.pictures)
    for index, picture in enumerate(example.pictures):
        small = picture if max(picture.size) <= PICTURE - 2 else ImageOps.contain(picture, (PICTURE - 2, PICTURE - 2))
        framed = ImageOps.expand(small, 1, EDGE)
        card.paste(framed, (round((index + 0.5) * slot - framed.width / 2), PAD + (PICTURE - framed.height) // 2))
    font = ImageFont.load_default(FONT)
    for index, (line, color) in enumerate(lines):
        draw.text((PAD, PICTURE + 2 * PAD + index * LINE), line, color, font)
    return card
