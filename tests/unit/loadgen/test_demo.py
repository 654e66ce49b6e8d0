"""The demo: which checkpoint it takes, and that a trained one must answer right."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image, ImageChops
from rich.console import Console

from triptych.loadgen import demo


@pytest.fixture
def one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(*_: object) -> demo.Outcome:
        return demo.Outcome("Monday", 0.1, 0.2, 1, {"stages": [], "attempts": 1})

    monkeypatch.setattr(demo, "ask", ask)


QUESTION = demo.Question("A question", "What day comes after Monday?", "Tuesday")


async def test_a_wrong_answer_of_trained_weights_fails(one_answer: None) -> None:
    with pytest.raises(demo.DemoFailed, match="Tuesday"):
        await demo.show(None, {"random_weights": False}, QUESTION, Console())  # type: ignore[arg-type]


async def test_noise_of_random_weights_is_shown(one_answer: None) -> None:
    console = Console(file=io.StringIO(), record=True)
    await demo.show(None, {"random_weights": True}, QUESTION, console)  # type: ignore[arg-type]
    shown = console.export_text()
    assert "first token after 100 ms, end after 200 ms; tokens: 1, attempts: 1" in shown
    assert "right" not in shown


async def test_the_trained_checkpoint_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (demo.MADE_CHECKPOINT, demo.TRAINED_CHECKPOINT):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        assert await demo.choose_checkpoint(Console()) == folder


def test_the_readme_shows_what_the_demo_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drawn, _ = demo.draw_pictures()
    with Image.open(drawn) as ours, Image.open(Path(__file__).parents[3] / "docs" / drawn.name) as shown:
        assert ImageChops.difference(ours, shown).getbbox() is None
