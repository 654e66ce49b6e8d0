"""Asks about scenes and knows the answers. A task that does not suit a scene without doubt is not asked: None."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from triptych.loadgen.world.colors import COLORS
from triptych.loadgen.world.scene import PLACES, SHAPES, Scene, Shape
from triptych.loadgen.world.seeds import pick
from triptych.loadgen.world.tasks import WORDINGS

BRITISH_SHARE = 0.25  # of the questions say "colour" and "grey"; chosen


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a task, and its one right answer."""

    task: str
    text: str
    answer: str


def ask_one(scene: Scene, task: str, rng: np.random.Generator) -> Question | None:
    """A question of one of ONE_PICTURE's tasks."""
    return _ASK_ONE[task](scene, rng)


def ask_many(scenes: Sequence[Scene], task: str, rng: np.random.Generator) -> Question | None:
    """A question of one of MANY_PICTURES' tasks."""
    return _ASK_MANY[task](scenes, rng)


def pick_tasks(weights: dict[str, float], count: int, rng: np.random.Generator) -> list[str]:
    """Tasks drawn by weight, with repetition."""
    shares = np.array(list(weights.values()))
    return [str(task) for task in rng.choice(list(weights), count, p=shares / shares.sum())]


def say(task: str, answer: object, rng: np.random.Generator, **fields: object) -> Question:
    """The question in one of the task's wordings that has exactly these fields."""
    text = pick([wording for wording in WORDINGS[task] if _fields(wording) == fields.keys()], rng).format(**fields)
    if rng.random() < BRITISH_SHARE:
        text = text.replace("color", "colour").replace("gray", "grey")
    return Question(task, text, str(answer))


@functools.cache
def _fields(wording: str) -> frozenset[str]:
    return frozenset(name for _, name, _, _ in string.Formatter().parse(wording) if name)


def with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def listing(shapes: Iterable[Shape]) -> str:
    """Such as "a red circle, an orange cross and a blue square"."""
    *others, last = (with_article(shape.name) for shape in shapes)
    return f"{', '.join(others)} and {last}" if others else last


def _only(shapes: Sequence[Shape], name: Callable[[Shape], str]) -> list[Shape]:
    """Those whose name no other has."""
    names = [name(shape) for shape in shapes]
    return [shape for shape in shapes if names.count(name(shape)) == 1]


def _kind(shape: Shape) -> str:
    return shape.kind


def _color(shape: Shape) -> str:
    return shape.color


def _name(shape: Shape) -> str:
    return shape.name


def _color_of(scene: Scene, rng: np.random.Generator) -> Question | None:
    if not (shapes := _only(scene.shapes, _kind)):
        return None
    shape = pick(shapes, rng)
    return say("color_of", shape.color, rng, shape=shape.kind)


def _shape_of(scene: Scene, rng: np.random.Generator) -> Question | None:
    if not (shapes := _only(scene.shapes, _color)):
        return None
    shape = pick(shapes, rng)
    return say("shape_of", shape.kind, rng, color=shape.color)


def _count(scene: Scene, rng: np.random.Generator) -> Question:
    return say("count", len(scene.shapes), rng)


def _count_color(scene: Scene, rng: np.random.Generator) -> Question:
    color, count = _pick_counted([(shape.color,) for shape in scene.shapes], COLORS, rng)
    return say("count_color", count, rng, color=color)


def _where(scene: Scene, rng: np.random.Generator) -> Question | None:
    name = _kind if rng.random() < 0.5 else _name
    shapes = [shape for shape in _only(scene.shapes, name) if shape.place]
    if not shapes:
        return None
    shape = pick(shapes, rng)
    return say("where", shape.place, rng, thing=name(shape))


def _what_at(scene: Scene, rng: np.random.Generator) -> Question | None:
    if any(shape.place is None for shape in scene.shapes):
        return None
    places = [place for place in PLACES if sum(shape.place == place for shape in scene.shapes) == 1]
    if not places:
        return None
    place = pick(places, rng)
    shape = next(shape for shape in scene.shapes if shape.place == place)
    return say("what_at", with_article(shape.name), rng, place=place)


def _list(scene: Scene, rng: np.random.Generator) -> Question | None:
    return say("list", listing(scene.shapes), rng) if scene.ordered else None


def _yesno(scene: Scene, rng: np.random.Generator) -> Question:
    answer, name = _there_or_not(scene, rng)
    return say("yesno", answer, rng, a_thing=with_article(name))


def _there_or_not(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    """Yes or no, half each, and what is asked for: for a no mostly a near miss, a colour or a kind of shape that is in the
    picture, with another one."""
    name = _name if rng.random() < 0.75 else _kind
    shape = pick(scene.shapes, rng)
    names = {name(shape) for shape in scene.shapes}
    answer = pick(("yes", "no"), rng)
    while answer == "no" and name(shape) in names:
        color = pick(COLORS, rng) if rng.random() < 0.55 else pick(scene.shapes, rng).color
        kind = pick(SHAPES, rng) if rng.random() < 0.55 else pick(scene.shapes, rng).kind
        shape = replace(shape, color=color, kind=kind)
    return answer, name(shape)


def _one_picture(scene: Scene, rng: np.random.Generator) -> Question:
    return say("one_picture", 1, rng)


def _pictures(scenes: Sequence[Scene], rng: np.random.Generator) -> Question:
    return say("pictures", len(scenes), rng)


def _which(scenes: Sequence[Scene], rng: np.random.Generator) -> Question | None:
    name = _name if rng.random() < 0.6 else _kind
    names = [{name(shape) for shape in scene.shapes} for scene in scenes]
    # By picture first: else pictures with more shapes are the answer more often.
    number = int(rng.integers(len(scenes)))
    only_here = sorted(names[number].difference(*(names[:number] + names[number + 1 :])))
    if not only_here:
        return None
    return say("which", f"picture {number + 1}", rng, a_thing=with_article(pick(only_here, rng)))


def _have_shape(scenes: Sequence[Scene], rng: np.random.Generator) -> Question:
    kind, count = _pick_counted([{shape.kind for shape in scene.shapes} for scene in scenes], SHAPES, rng)
    return say("have_shape", count, rng, shape=kind)


def _have_color(scenes: Sequence[Scene], rng: np.random.Generator) -> Question:
    color, count = _pick_counted([{shape.color for shape in scene.shapes} for scene in scenes], COLORS, rng)
    return say("have_color", count, rng, a_color=with_article(color))


def _pick_counted(groups: Sequence[Iterable[str]], names: Sequence[str], rng: np.random.Generator) -> tuple[str, int]:
    """A name and how many of the groups have it; each count that occurs, 0 too, is as likely as the others."""
    counts = {name: sum(name in group for group in groups) for name in names}
    wanted = pick(sorted(set(counts.values())), rng)
    return pick([name for name in names if counts[name] == wanted], rng), wanted


def _color_in(scenes: Sequence[Scene], rng: np.random.Generator) -> Question | None:
    number = int(rng.integers(len(scenes)))
    shapes = scenes[number].shapes
    if len(shapes) == 1 and rng.random() < 0.6:
        return say("color_in", shapes[0].color, rng, thing="shape", number=number + 1)
    if not (candidates := _only(shapes, _kind)):
        return None
    shape = pick(candidates, rng)
    return say("color_in", shape.color, rng, thing=shape.kind, number=number + 1)


def _shape_in(scenes: Sequence[Scene], rng: np.random.Generator) -> Question | None:
    number = int(rng.integers(len(scenes)))
    shapes = scenes[number].shapes
    if len(shapes) == 1 and rng.random() < 0.6:
        return say("shape_in", shapes[0].kind, rng, number=number + 1)
    if not (candidates := _only(shapes, _color)):
        return None
    shape = pick(candidates, rng)
    return say("shape_in", shape.kind, rng, color=shape.color, number=number + 1)


def _count_in(scenes: Sequence[Scene], rng: np.random.Generator) -> Question:
    number = int(rng.integers(len(scenes)))
    return say("count_in", len(scenes[number].shapes), rng, number=number + 1)


def _yesno_in(scenes: Sequence[Scene], rng: np.random.Generator) -> Question:
    number = int(rng.integers(len(scenes)))
    answer, name = _there_or_not(scenes[number], rng)
    return say("yesno_in", answer, rng, a_thing=with_article(name), number=number + 1)


def _list_in(scenes: Sequence[Scene], rng: np.random.Generator) -> Question | None:
    number = int(rng.integers(len(scenes)))
    scene = scenes[number]
    return say("list_in", listing(scene.shapes), rng, number=number + 1) if scene.ordered else None


_ASK_ONE: dict[str, Callable[[Scene, np.random.Generator], Question | None]] = {
    "color_of": _color_of,
    "shape_of": _shape_of,
    "count": _count,
    "count_color": _count_color,
    "where": _where,
    "what_at": _what_at,
    "list": _list,
    "yesno": _yesno,
    "one_picture": _one_picture,
}
_ASK_MANY: dict[str, Callable[[Sequence[Scene], np.random.Generator], Question | None]] = {
    "pictures": _pictures,
    "which": _which,
    "have_shape": _have_shape,
    "have_color": _have_color,
    "color_in": _color_in,
    "shape_in": _shape_in,
    "count_in": _count_in,
    "yesno_in": _yesno_in,
    "list_in": _list_in,
}
