"""`loadgen draw`: a sheet that shows what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from triptych.loadgen.cli import main
from triptych.loadgen.contact_sheet import draw_sheet, examples
from triptych.loadgen.world import ADVERTISED, MANY_PICTURES, ONE_PICTURE


def test_the_command_writes_the_sheet_and_says_where(tmp_path: Path) -> None:
    out = tmp_path / "new folder" / "sheet.png"
    done = CliRunner().invoke(main, ["draw", "--seed", "3", "--count", "9", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert done.output.replace("\n", "") == str(out)
    with Image.open(out) as sheet:
        assert sheet.tobytes() == draw_sheet(9, 3).tobytes()


@pytest.mark.parametrize("name", ["sheet.jpg", "sheet", "folder.png"])
def test_the_command_refuses_what_is_no_png(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.png").mkdir()
    refused = CliRunner().invoke(main, ["draw", "--out", str(tmp_path / name)])
    assert refused.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_it_shows_the_advertised_tasks_of_one_and_of_several_pictures() -> None:
    shown = list(examples(40, seed=0))
    tasks = {example.question.task for example in shown}
    assert len(shown) == 40
    assert tasks == {task for task in (*ONE_PICTURE, *MANY_PICTURES) if task in ADVERTISED}
    assert sum(len(example.pictures) > 1 for example in shown) == 10


def test_a_seed_gives_the_same_sheet_and_any_count_has_room() -> None:
    sheets = [draw_sheet(count, seed) for count, seed in ((1, 0), (7, 0), (7, 0), (7, 1), (13, 0))]
    assert sheets[1].tobytes() == sheets[2].tobytes() != sheets[3].tobytes()
    assert sheets[0].height < sheets[1].height < sheets[4].height
    assert len({sheet.width for sheet in sheets}) == 1
