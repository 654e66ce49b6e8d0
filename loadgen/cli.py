"""The `loadgen` command. Each subcommand is a thin layer over a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.loadgen.checkpoint import KINDS, make_checkpoint

main = typer.Typer(no_args_is_help=True, add_completion=False, help="Checkpoints, questions and load for Triptych.")


@main.callback()
def root() -> None:
    """Keeps `loadgen COMMAND` a group while there are few commands."""


@main.command("make-checkpoint")
def make_checkpoint_command(
    kind: Annotated[str, typer.Argument(help="tiny (tests) or bench (measurements)")],
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


if __name__ == "__main__":
    main()
