"""Questions: a reader who knows the text and what is where gives the same answers; the split and the chance levels hold."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from triptych.loadgen.world import (
    ADVERTISED,
    MANY_PICTURES,
    MEMORISED,
    ONE_PICTURE,
    TASKS,
    TEXT,
    WORDINGS,
    Question,
    Scene,
    Shape,
    ask_many,
    ask_one,
    ask_text,
    chance,
    corpus,
    generator,
    held_out_examples,
    make_scene,
    multi_scenes,
    pick_tasks,
)

NUM_QUESTIONS = 160  # of each task
DAYS = "Sunday Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()  # noqa: SIM905


def asked(task: str, count: int, held_out: bool = False) -> list[tuple[Question, list[Scene]]]:
    found: list[tuple[Question, list[Scene]]] = []
    rng = generator(3, TASKS.index(task), held_out=held_out)
    while len(found) < count:
        scenes = [] if task in TEXT else [make_scene(rng)] if task in ONE_PICTURE else multi_scenes(rng)
        ask = ask_text(task, rng, held_out) if task in TEXT else None
        if scenes:
            ask = ask_one(scenes[0], task, rng) if task in ONE_PICTURE else ask_many(scenes, task, rng)
        if ask is not None:
            found.append((ask, scenes))
    return found


# A reader of the questions. It finds things by looking at all shapes, and fails where two fit.


def fit(scene: Scene, words: str) -> list[Shape]:
    """Those of which words such as "red circle", "circle" or "shape" are said."""
    return [shape for shape in scene.shapes if {*words.split()} <= {shape.color, shape.kind, "shape"}]


def the(scene: Scene, words: str) -> Shape:
    (only,) = fit(scene, words)
    return only


def place(shape: Shape) -> str:
    if abs(shape.x - 0.5) < 0.1 and abs(shape.y - 0.5) < 0.1:
        return "center"
    return f"{'top' if shape.y < 0.5 else 'bottom'} {'left' if shape.x < 0.5 else 'right'}"


def described(shapes: Sequence[Shape]) -> str:
    text = ", ".join(f"a {shape.color} {shape.kind}" for shape in shapes).replace("a orange", "an orange")
    return " and ".join(text.rsplit(", ", 1))


def whole(scene: Scene) -> str:
    assert scene.ordered
    return described(scene.shapes)


def at(scene: Scene, name: str) -> str:
    assert all(shape.place for shape in scene.shapes), "somebody could mean another one"
    (only,) = [shape for shape in scene.shapes if place(shape) == name]
    return described([only])


def count_pictures(scenes: Sequence[Scene], words: str) -> int:
    return len([scene for scene in scenes if fit(scene, words)])


def which_picture(scenes: Sequence[Scene], words: str) -> str:
    (only,) = [number for number, scene in enumerate(scenes, 1) if fit(scene, words)]
    return f"picture {only}"


ONE: dict[str, Callable[..., object]] = {
    r"What color is the (.+)\?": lambda scene, words: the(scene, words).color,
    r"What shape is the (.+) one\?": lambda scene, words: the(scene, words).kind,
    r"What shape is (\w+)\?": lambda scene, words: the(scene, words).kind,
    r"How many shapes are there\?": lambda scene: len(scene.shapes),
    r"How many (.+) shapes are there\?": lambda scene, words: len(fit(scene, words)),
    r"Where is the (.+)\?": lambda scene, words: place(the(scene, words)),
    r"What is in the picture\?|Describe the picture\.": whole,
    r"What is in the (.+)\?": at,
    r"Is there an? (.+)\?": lambda scene, words: "yes" if fit(scene, words) else "no",
    r"How many pictures are there\?": lambda scene: 1,
}
MANY: dict[str, Callable[..., object]] = {
    r"How many pictures are there\?": len,
    r"Which picture has an? (.+)\?": which_picture,
    r"How many pictures have an? (.+)\?": count_pictures,
    r"What color is the (.+) in picture (\d)\?": lambda scenes, words, k: the(scenes[int(k) - 1], words).color,
    r"What shape is in picture (\d)\?": lambda scenes, k: the(scenes[int(k) - 1], "shape").kind,
    r"What shape is (.+) in picture (\d)\?": lambda scenes, words, k: the(scenes[int(k) - 1], words).kind,
    r"How many shapes are in picture (\d)\?": lambda scenes, k: len(scenes[int(k) - 1].shapes),
    r"Is there an? (.+) in picture (\d)\?": lambda scenes, words, k: "yes" if fit(scenes[int(k) - 1], words) else "no",
    r"Describe picture (\d)\.": lambda scenes, k: whole(scenes[int(k) - 1]),
}
ALONE: dict[str, Callable[..., object]] = {
    r"What day comes after (.+)\?": lambda day: DAYS[DAYS.index(day) + 1],
    r"Which is larger, (\d+) or (\d+)\?": lambda a, b: max(int(a), int(b)),
    r"Repeat: (.+)": lambda words: words,
    r"Sort the letters: (.+)": lambda letters: " ".join(sorted(letters.split())),
    r"What is (\d) \+ (\d)\?": lambda a, b: int(a) + int(b),
}


def read(question: Question, scenes: Sequence[Scene]) -> str:
    text = question.text.replace("colour", "color").replace("grey", "gray")
    patterns, about = (ONE, scenes[:1]) if question.task in ONE_PICTURE else (MANY, [scenes])
    if question.task in TEXT:
        patterns, about = ALONE, []
    for pattern, answer in patterns.items():
        if match := re.fullmatch(pattern, text):
            return str(answer(*about, *match.groups()))
    raise AssertionError(f"not understood: {text}")


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right(task: str) -> None:
    questions = asked(task, NUM_QUESTIONS) + asked(task, NUM_QUESTIONS // 4, held_out=True)
    for question, scenes in questions:
        assert question.task == task
        assert question.answer == read(question, scenes), (question, scenes)


@pytest.mark.parametrize("task", TASKS)
def test_every_wording_is_asked(task: str) -> None:
    texts = [question.text.replace("colour", "color").replace("grey", "gray") for question, _ in asked(task, NUM_QUESTIONS)]
    forms = [re.sub(r"\\\{\w+\\\}", ".+", re.escape(wording)) for wording in WORDINGS[task]]
    for form in forms:
        assert any(re.fullmatch(form, text) for text in texts), form
    assert all(any(re.fullmatch(form, text) for form in forms) for text in texts)


def test_both_spellings_are_asked_and_one_is_answered() -> None:
    questions = [question for task in ("color_of", "yesno", "list") for question, _ in asked(task, NUM_QUESTIONS)]
    texts = " ".join(question.text for question in questions)
    assert all(word in texts for word in ("color", "colour", "gray", "grey"))
    answers = " ".join(question.answer for question in questions)
    assert "gray" in answers
    assert "grey" not in answers


@pytest.mark.parametrize(
    ("task", "at_most"),
    [
        ("yesno", 0.5),
        ("yesno_in", 0.5),
        ("count_in", 0.55),
        ("which", 0.42),
        ("count", 0.34),
        ("count_color", 0.48),
        ("have_shape", 0.38),
        ("have_color", 0.45),
    ],
)
def test_no_answer_is_much_more_frequent_than_the_others(task: str, at_most: float) -> None:
    assert chance(task) == pytest.approx(at_most, abs=0.04)
    answers = Counter(question.answer for question, _ in asked(task, 1000, held_out=True))
    assert max(answers.values()) / 1000 <= chance(task) + 0.05


def test_chance_of_a_task_with_one_answer_is_certain_and_that_is_not_advertised() -> None:
    assert chance("one_picture") == 1
    assert not [task for task in ADVERTISED if len({question.answer for question, _ in asked(task, 30)}) == 1]


def test_enough_is_advertised() -> None:
    assert len(set(TASKS)) == len(TASKS) == len(WORDINGS)
    assert set(ADVERTISED) <= set(TASKS)
    for tasks, least in ((ONE_PICTURE, 7), (MANY_PICTURES, 5), (TEXT, 5)):
        assert len([task for task in tasks if task in ADVERTISED]) >= least


@pytest.mark.parametrize("task", sorted(set(TEXT) - set(MEMORISED)))
def test_training_never_sees_a_held_out_text_item(task: str) -> None:
    """Nor the same numbers or letters in another order."""

    def items(held_out: bool) -> set[str]:
        texts = {question.text for question, _ in asked(task, 1000, held_out=held_out)}
        return {" ".join(sorted(re.findall(r"\d+|\b\w\b", text))) or text for text in texts}

    training, held_out = items(held_out=False), items(held_out=True)
    assert len(held_out) > 200
    assert not training & held_out


def test_memorised_tasks_are_small() -> None:
    for task, most in zip(MEMORISED, (7, 100), strict=True):
        assert len({question.text for question, _ in asked(task, 1000)}) <= most


@pytest.mark.parametrize("task", ["yesno", "which", "repeat"])
def test_held_out_examples_come_again_with_the_seed(task: str) -> None:
    first, again = (list(held_out_examples(task, 20)) for _ in range(2))
    other = list(held_out_examples(task, 20, seed=1))
    assert first == again
    assert first != other
    assert all(example.question.task == task for example in first)
    sizes = {len(example.pictures) for example in first}
    assert sizes == ({1} if task in ONE_PICTURE else {2, 3} if task in MANY_PICTURES else {0})


@pytest.mark.parametrize("task", sorted(set(TEXT) - set(MEMORISED)))
def test_held_out_text_questions_do_not_repeat(task: str) -> None:
    texts = [example.question.text for example in held_out_examples(task, 500)]
    assert len(set(texts)) == 500


def test_questions_do_not_depend_on_the_hash_seed() -> None:
    """Sets of names have another order in every process."""
    code = (
        "from triptych.loadgen.world import held_out_examples as ask;"
        "print([example.question for task in ('which', 'have_color', 'yesno') for example in ask(task, 20)])"
    )
    first, second = (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, timeout=60)
        for seed in ("1", "2")
    )
    assert first.stdout == second.stdout


def test_tasks_are_drawn_by_weight() -> None:
    drawn = Counter(pick_tasks({"often": 3.0, "seldom": 1.0, "never": 0.0}, 4000, generator(0)))
    assert set(drawn) == {"often", "seldom"}
    assert drawn["often"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_the_tokenizer_sees_every_task_and_no_held_out_text() -> None:
    texts = list(corpus(50, seed=1))
    assert len(texts) == 2 * 50 * len(TASKS)
    assert texts == list(corpus(50, seed=1))
    held_out = {example.question.text for task in ("repeat", "sort", "larger") for example in held_out_examples(task, 500)}
    assert not held_out & set(texts)
