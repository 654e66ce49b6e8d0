"""Gives a command one flag for every field of Settings (generated, never copied by hand), and prints its errors.

A flag wins over its TRIPTYCH_* environment twin. An unknown flag is an error that names it and lists what is allowed.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Container
from typing import Annotated, Any, NoReturn

import typer

from triptych.shared.errors import BadRequest, TriptychError
from triptych.shared.settings import PREFIX, Settings, load_settings

EXIT_USAGE = 2
EXTRA_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""context_settings of every command made by with_settings, which then refuses the extra arguments itself."""
PANEL = f"Settings (each also in the environment: {PREFIX}PORT is --port)"


def flag_of(field_name: str) -> str:
    """The command-line form of a field's name."""
    return "--" + field_name.replace("_", "-")


def fail(error: TriptychError) -> NoReturn:
    """End the command with one clear line: status 2 for a mistake in the call, else 1."""
    sys.stderr.write(f"error: {error.message}\n")
    raise typer.Exit(EXIT_USAGE if isinstance(error, BadRequest) else 1)


def with_settings(
    *without: str, shown: Container[str] = frozenset(Settings.model_fields)
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes `command(settings, ...)` a typer command: its own parameters, and a flag for each setting but those named.
    shown: the settings whose flags --help lists; the others are taken all the same."""
    return functools.partial(_add_flags, without, shown)


def _add_flags(without: tuple[str, ...], shown: Container[str], command: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "settings"]
    fields = [name for name in Settings.model_fields if name not in signature.parameters and name not in without]

    @functools.wraps(command)
    def run(ctx: typer.Context, **values: Any) -> None:
        if ctx.args:
            fail(_unknown(ctx))
        try:
            settings = load_settings(**{name: values.pop(name) for name in fields})
            command(settings, **values)
        except TriptychError as error:
            fail(error)

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *own, *(_option(name, name not in shown) for name in fields)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # typer would look through it, at the bare command
    return run


def _unknown(ctx: typer.Context) -> BadRequest:
    given = ctx.args[0].partition("=")[0]
    if not given.startswith("-"):
        return BadRequest(
            f"unexpected argument {ctx.args[0]!r}: settings are flags, such as {_example(ctx)}", code="unknown_setting"
        )
    allowed = sorted(option for parameter in ctx.command.params for option in parameter.opts if option.startswith("-"))
    close = difflib.get_close_matches(given, allowed, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return BadRequest(f"unknown setting {given}{hint}; allowed: {', '.join(allowed)}", code="unknown_setting")


def _example(ctx: typer.Context) -> str:
    return f"{flag_of('model')} {ctx.args[0]}" if ctx.info_name == "up" else f"{flag_of('port')} 8000"


def _option(name: str, is_hidden: bool) -> inspect.Parameter:
    info = Settings.model_fields[name]
    kind: Any = info.annotation if info.annotation in (int, float, bool) else str
    choices = [choice for choice in getattr(info.annotation, "__args__", ()) if choice]
    help_text = "; ".join(part for part in (info.description, "one of " + ", ".join(choices) if choices else "") if part)
    default = f"(default {info.default})" if info.default not in ("", None, False) else ""  # [...] would be read as markup
    # named, so that a bool gets no --no-NAME: that column would cut the names of the others at 80 characters a line
    option = typer.Option(
        flag_of(name), help=f"{help_text} {default}".strip(), show_default=False, rich_help_panel=PANEL, hidden=is_hidden
    )
    # keyword-only: typer takes them in any order, and a command's own required arguments stay first
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])
