"""`make demo`: start a cluster, ask it three questions over HTTP, show each answer as it streams and the path it took.

Talks to `triptych up` as any client would: a child process, its JSON line, the chat API. Files go to build/demo.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image, ImageDraw
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from triptych.loadgen.client import TRACE_HEADERS, AnswerFailed, chat_body, read_events, text_of
from triptych.loadgen.cluster import LOG_TAIL_CHARS, START_TIMEOUT_S, ClusterFailed, running_cluster

TRAINED_CHECKPOINT = Path("deploy/demo/checkpoint")
MADE_CHECKPOINT = Path("build/checkpoints/tiny")
FOLDER = Path("build/demo")
MAX_TOKENS = 32  # chosen: the answers of the demo's model are shorter
REQUEST_TIMEOUT_S = 120.0  # the server's own default deadline


class DemoFailed(Exception):
    """Something that a user can read ended the demo."""


@dataclass(frozen=True, slots=True)
class Question:
    """right: what a model that was trained on such pictures answers."""

    title: str
    text: str
    right: str
    pictures: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one question went: seconds to the first piece of text and to the end, and the server's trace."""

    text: str
    ttft_s: float
    total_s: float
    num_tokens: int
    trace: dict[str, Any]


async def choose_checkpoint(console: Console) -> Path:
    """The trained demo checkpoint when there is one, else a small random one, made if it is missing."""
    for folder in (TRAINED_CHECKPOINT, MADE_CHECKPOINT):
        if (folder / "config.json").exists():
            return folder
    with console.status("Making a small checkpoint ..."):
        command = (sys.executable, "-m", "triptych.loadgen.cli", "make-checkpoint", "tiny", str(MADE_CHECKPOINT))
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), START_TIMEOUT_S)
    if process.returncode != 0:
        raise DemoFailed(f"could not make a checkpoint:\n{output.decode(errors='replace')[-LOG_TAIL_CHARS:]}")
    return MADE_CHECKPOINT


def draw_pictures() -> tuple[Path, Path]:
    """Two pictures to ask about: a red circle beside a blue square, and a green triangle."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    first, second = Image.new("RGB", (224, 224), "white"), Image.new("RGB", (168, 168), "white")
    draw = ImageDraw.Draw(first)
    draw.ellipse((20, 20, 90, 90), fill=(220, 40, 40))
    draw.rectangle((130, 130, 200, 200), fill=(40, 80, 220))
    ImageDraw.Draw(second).polygon([(84, 34), (134, 126), (34, 126)], fill=(40, 160, 60))
    paths = FOLDER / "circle-and-square.png", FOLDER / "triangle.png"
    for image, path in zip((first, second), paths, strict=True):
        image.save(path)
    return paths


async def ask(http: aiohttp.ClientSession, info: dict[str, Any], question: Question, console: Console) -> Outcome:
    """Send one question and print the answer while it comes."""
    begin_s = time.monotonic()
    ttft_s, num_tokens, answer = 0.0, 0, ""
    trace: dict[str, Any] = {}
    body = chat_body(question.text, [path.read_bytes() for path in question.pictures], MAX_TOKENS, model=info["model"])
    async with http.post(f"{info['url'].rstrip('/')}/v1/chat/completions", json=body, headers=TRACE_HEADERS) as response:
        async for chunk in read_events(response):
            if text := text_of(chunk):
                ttft_s = ttft_s or time.monotonic() - begin_s
                answer += text
                shown = "".join(letter if letter.isprintable() else " " for letter in text)
                console.print(shown, end="", style="bold", markup=False, highlight=False, soft_wrap=True)
            num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
            trace = chunk.get("triptych") or trace
    console.print()
    if not num_tokens or not trace:
        raise DemoFailed("the answer has no usage or no trace")
    return Outcome(answer, ttft_s, time.monotonic() - begin_s, num_tokens, trace)


def path_table(trace: dict[str, Any]) -> Table:
    """One row for each stage of the request, times in milliseconds."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("stage", "instance"):
        table.add_column(name, no_wrap=True)
    for name in ("queued ms", "transfer ms", "compute ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in trace["stages"]:
        times = (f"{row[name]:.1f}" for name in ("queued_ms", "transfer_ms", "compute_ms"))
        table.add_row(row["stage"], row["instance_id"], *times)
    return table


async def show(http: aiohttp.ClientSession, info: dict[str, Any], question: Question, console: Console) -> None:
    """One question with its pictures, its answer and its path.

    Raises:
        DemoFailed: the weights are trained, and the answer is wrong.
    """
    for path in question.pictures:
        console.print(f"picture  {path}", markup=False, highlight=False)
    console.print(f"user     {question.text}", markup=False, highlight=False)
    console.print("answer   ", end="")
    outcome = await ask(http, info, question, console)
    if not info.get("random_weights"):
        if outcome.text.strip() != question.right:
            raise DemoFailed(f"the right answer is: {question.right}")
        console.print("         [green]that is right[/]")
    console.print(path_table(outcome.trace))
    times = f"first token after {1000 * outcome.ttft_s:.0f} ms, end after {1000 * outcome.total_s:.0f} ms"
    console.print(f"{times}; tokens: {outcome.num_tokens}, attempts: {outcome.trace['attempts']}", highlight=False)


async def run(console: Console) -> None:
    """The whole demo.

    Raises:
        DemoFailed: a question was not answered, or the cluster did not start.
    """
    shapes, triangle = draw_pictures()
    questions = (
        Question("A text question", "What day comes after Monday?", "Tuesday"),
        Question("A question about a picture", "Describe the picture.", "a red circle and a blue square", (shapes,)),
        Question("A question about two pictures", "What color is the triangle in picture 2?", "green", (shapes, triangle)),
    )
    checkpoint = await choose_checkpoint(console)
    begin_s = time.monotonic()
    async with running_cluster(checkpoint, FOLDER, console) as info:
        console.print(
            f"Cluster of {checkpoint} ready at {info['url']} after {time.monotonic() - begin_s:.1f} s", highlight=False
        )
        if info.get("random_weights"):
            console.print("[yellow]The weights are random: the answers are noise, the path they take is real.[/]")
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            for number, question in enumerate(questions, 1):
                console.print()
                console.rule(f"{number}. {question.title}", align="left")
                await show(http, info, question, console)
    console.print()
    console.print("All three answered; the cluster is stopped. Start your own, to ask what you like:", soft_wrap=True)
    console.print(f"  .venv/bin/triptych up --model {checkpoint}", markup=False, highlight=False, soft_wrap=True)


def main() -> int:
    """Exit status 0 only when all three questions were answered."""
    console = Console()
    try:
        asyncio.run(run(console))
    except (DemoFailed, ClusterFailed, AnswerFailed, TimeoutError, aiohttp.ClientError) as error:
        console.print(f"\n[red]The demo failed:[/] {escape(str(error) or type(error).__name__)}", highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
