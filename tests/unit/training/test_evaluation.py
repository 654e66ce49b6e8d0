"""evaluate.py: batches answer as single questions do, the card says what was measured, and nothing bad is advertised."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import evaluate
import pytest
import torch
from evaluation.answering import Answerer
from evaluation.card import BEGIN, END, write_card
from evaluation.scores import DrawingScore, TaskScore

from triptych.loadgen.world import ADVERTISED, TASKS, WORDINGS, Example, held_out_examples

CHECKPOINT = evaluate.CARD.parent / "checkpoint"
ASKED_TASKS = ("color_of", "list", "which", "list_in", "sort")


@torch.inference_mode()
def test_a_batch_answers_as_each_question_alone() -> None:
    answerer = Answerer(CHECKPOINT)
    examples = list(chain.from_iterable(held_out_examples(task, 3) for task in ASKED_TASKS))
    together = answerer.inputs(examples)
    assert not together["attention_mask"].all(), "some prompts should be padded"
    alone = torch.cat([answerer.model(**answerer.inputs([example])).logits[:, -1] for example in examples])
    torch.testing.assert_close(answerer.model(**together).logits[:, -1], alone, atol=1e-4, rtol=1e-4)
    assert answerer.answers(examples) == [answerer.answers([example])[0] for example in examples]


class Oracle:
    """Answers right, but for one task."""

    wrong_task = "sort"

    def __init__(self, folder: Path) -> None:
        pass

    def answers(self, examples: Sequence[Example]) -> list[str]:
        return ["?" if example.question.task == self.wrong_task else example.question.answer for example in examples]


def _evaluate(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(evaluate, "Answerer", Oracle)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(CHECKPOINT), *options])
    return evaluate.main()


def test_a_bad_task_must_not_be_advertised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--questions", "3", "--json", str(tmp_path / "out.json"))
    assert _evaluate(monkeypatch, *options, "--tasks", "color_of", "day", "sort") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "advertised, but under 0.90: sort 0.000"
    told = json.loads((tmp_path / "out.json").read_text())["tasks"]
    assert [(score["task"], score["accuracy"], score["memorised"]) for score in told] == [
        ("color_of", 1.0, False),
        ("day", 1.0, True),
        ("sort", 0.0, False),
    ]
    assert _evaluate(monkeypatch, *options, "--tasks", "color_of", "day") == 0


def test_drawings_are_asked_about(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _evaluate(monkeypatch, "--drawings") == 0
    assert "(1.000)" in capsys.readouterr().out
    monkeypatch.setattr(Oracle, "wrong_task", "list")
    assert _evaluate(monkeypatch, "--drawings") == 1
    assert "red_circle: Describe the picture. (list)  '?', not 'a red circle'" in capsys.readouterr().out


@pytest.mark.parametrize("options", [("--questions", "199"), ("--tasks", "day")])
def test_a_card_wants_all_of_it(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _evaluate(monkeypatch, "--card", *options)
    assert "--card wants all tasks and at least 200 questions of each" in capsys.readouterr().err


def test_the_card_has_a_row_for_each_advertised_task(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text(evaluate.CARD.read_text())
    scores = [TaskScore(task, 191, 200, 0.12, task == "day", task in ADVERTISED) for task in TASKS]
    for num_asked in (50, 60):  # the second time over the first
        write_card(card, CHECKPOINT, scores, DrawingScore(num_asked, ()))
    (before, measured), after = card.read_text().split(BEGIN), evaluate.CARD.read_text().split(END)[1]
    assert before == evaluate.CARD.read_text().split(BEGIN)[0]
    assert measured.endswith(END + after)
    rows = [line for line in measured.splitlines() if line.endswith("| 0.955 | 200 | 0.12 |")]
    assert [row.split()[1] for row in rows] == list(ADVERTISED)
    assert all(wording in row for row, task in zip(rows, ADVERTISED, strict=True) for wording in WORDINGS[task])
    assert [row for row in rows if "(m)" in row] == [row for row in rows if row.startswith("| day ")]
    assert all(f"{task} 0.955" in measured for task in TASKS if task not in ADVERTISED)
    assert "60 of 60 questions" in measured
