"""The `loadgen` command. Each subcommand is a thin layer over a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.loadgen.bench.commands import bench
from triptych.loadgen.checkpoint import KINDS, make_checkpoint
from triptych.loadgen.contact_sheet import draw_sheet
from triptych.loadgen.replay.commands import app as replay_app
from triptych.loadgen.report.commands import register as register_report
from triptych.loadgen.synth.commands import synth

main = typer.Typer(no_args_is_help=True, add_completion=False, help="Checkpoints, questions and load for Triptych.")
main.add_typer(bench, name="bench")
register_report(main)
main.add_typer(replay_app)
main.add_typer(synth)


@main.command("make-checkpoint")
def make_checkpoint_command(
    kind: Annotated[str, typer.Argument(help="tiny (tests), bench or smollm2-135m (measurements)")],
    out: Annotated[Path, typer.Argument(help="folder to write to")],
    seed: Annotated[int, typer.Option(help="other seeds give other weights")] = 0,
) -> None:
    """Write a seeded random checkpoint: weights, tokenizer, processor, chat template."""
    chosen = next((known for known in KINDS if known == kind), None)
    if chosen is None:
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(KINDS)}", param_hint="KIND")
    if out.exists() and not (out / "config.json").is_file() and (out.is_file() or any(out.iterdir())):
        raise typer.BadParameter(f"{str(out)!r} exists and is no checkpoint: name a new or empty folder", param_hint="OUT")
    print(make_checkpoint(chosen, out, seed))


@main.command("draw")
def draw_command(
    seed: Annotated[int, typer.Option(min=0, help="other seeds give other pictures and questions")] = 0,
    count: Annotated[int, typer.Option(min=1, max=1000, help="number of questions")] = 24,
    out: Annotated[Path, typer.Option(help="PNG file to write")] = Path("build/world.png"),
) -> None:
    """Draw a sheet of the world's pictures, each with a question and the right answer."""
    if out.suffix.lower() != ".png" or out.is_dir():
        raise typer.BadParameter(f"{str(out)!r} is no name of a PNG file", param_hint="--out")
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_sheet(count, seed).save(out)
    print(out)


if __name__ == "__main__":
    main()
