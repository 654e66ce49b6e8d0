"""`loadgen replay` against a stub server: the schedule is kept, every request has exactly one outcome, however it goes."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from support.stub_target import MODEL, Reply, StubTarget, counting
from triptych.loadgen.replay.conditions import OUTCOMES_FILE, Conditions, read_conditions
from triptych.loadgen.replay.open_loop import SendOptions
from triptych.loadgen.replay.options import ReplayOptions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.pictures import PictureOptions
from triptych.loadgen.replay.run import replay
from triptych.loadgen.replay.slo import parse_slos
from triptych.loadgen.replay.watchdog import Watchdog
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.shaping import shaped
from triptych.loadgen.traces.trace import MalformedRow, MalformedRows, Shaping, Trace, TraceOptions

SMALL = PictureOptions(size=(64, 64))
LATE_S = 2.0  # a loaded machine; nothing here is a measurement
TEXT = [TraceRow(0.01 * i, 50, 2) for i in range(20)]


@dataclass(frozen=True, slots=True)
class Ran:
    conditions: Conditions
    outcomes: list[RequestOutcome]
    told: str

    @property
    def errors(self) -> list[str | None]:
        return [outcome.error for outcome in sorted(self.outcomes, key=lambda outcome: outcome.index)]


async def run(stub: StubTarget | str, rows: Iterable[TraceRow], out: Path, **options: Any) -> Ran:
    """What came of the rows; each row read is in one outcome, in the file as in memory."""
    target = stub if isinstance(stub, str) else stub.url
    console = Console(file=io.StringIO())
    malformed = MalformedRows(2, [MalformedRow(7, "no number")])
    given = {"pictures": SMALL, "timeout_s": 30.0, **options}
    conditions = await replay(Trace("t", "triptych", iter(rows), malformed), ReplayOptions(target, out, **given), console)
    assert read_conditions(out) == conditions
    assert (conditions.num_malformed_rows, conditions.malformed_rows) == (2, ("line 7: no number",))
    lines = (out / OUTCOMES_FILE).read_bytes().splitlines()
    outcomes = [msgspec.json.decode(line, type=RequestOutcome) for line in lines]
    assert sorted(outcome.index for outcome in outcomes) == list(range(len(outcomes)))
    assert isinstance(console.file, io.StringIO)
    return Ran(conditions, outcomes, console.file.getvalue())


def texts_of(body: dict[str, Any]) -> list[str]:
    """Of each message."""

    def text(content: str | list[dict[str, Any]]) -> str:
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

    return [text(message["content"]) for message in body["messages"]]


def asked(stub: StubTarget) -> list[dict[str, Any]]:
    """Bodies of the trace's requests: those before count tokens."""
    return [received.body for received in stub.received if received.body["max_tokens"] > 1]


async def test_each_request_is_sent_when_the_trace_has_it(tmp_path: Path) -> None:
    rows = [TraceRow(0.02 * i, 60, 3, num_images=i % 3) for i in range(60)]
    async with StubTarget(counting("a ", "b ", "c")) as stub:
        ran = await run(stub, rows, tmp_path)
        at_s = [received.at_s for received in stub.received if received.body["max_tokens"] > 1]
    assert ran.errors == [None] * 60
    assert (ran.conditions.ended, ran.conditions.message, ran.conditions.model) == ("complete", "", MODEL)
    assert ran.conditions.versions["server"] == "1.2.3"
    assert ran.conditions.tokens_per_word == pytest.approx(1.5, abs=0.01)
    for outcome in ran.outcomes:
        row = rows[outcome.index]
        assert (outcome.scheduled_s, outcome.num_images, outcome.request_class) == (
            row.arrival_s,
            row.num_images,
            row.request_class,
        )
        assert outcome.first_token_s is not None
        assert outcome.last_token_s is not None
        assert -0.002 < outcome.send_lag_s < LATE_S
        assert outcome.sent_s < outcome.first_token_s <= outcome.last_token_s <= outcome.end_s
        assert len(outcome.token_gaps_s) == 2
        assert (outcome.num_output_tokens, outcome.is_right) == (3, None)
    assert at_s[-1] - at_s[0] > 1.1  # not as fast as it could


async def test_what_is_sent(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 60, 3), TraceRow(0.0, 300, 4, num_images=2)]
    async with StubTarget() as stub:
        await run(stub, rows, tmp_path, headers={"Authorization": "Bearer k"}, model=MODEL)
        assert all("Bearer k" in received.headers for received in stub.received)
        text, image = sorted(asked(stub), key=lambda body: int(body["max_tokens"]))
    fields = {name: value for name, value in text.items() if name != "messages"}
    assert fields == {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 3,
        "ignore_eos": True,
    }
    kinds = [part["type"] for part in image["messages"][0]["content"]]
    assert kinds == ["image_url", "image_url", "text"]


async def test_latency_counts_from_the_schedule_and_the_cap_is_kept(tmp_path: Path) -> None:
    """Eight at once, two places, 0.1 s each: the last two wait 0.3 s, and that is their latency."""
    async with StubTarget(lambda _: Reply(["x"], delay_s=0.1)) as stub:
        ran = await run(stub, [TraceRow(0.0, 20, 2)] * 8, tmp_path, send=SendOptions(concurrency=2))
    events = sorted([(one.sent_s, 1) for one in ran.outcomes] + [(one.end_s, -1) for one in ran.outcomes])
    most = max(itertools.accumulate(change for _, change in events))
    assert most == 2
    lags = sorted(outcome.send_lag_s for outcome in ran.outcomes)
    assert lags[-1] >= 0.28
    assert all(outcome.ttft_s is not None and outcome.ttft_s >= outcome.send_lag_s + 0.09 for outcome in ran.outcomes)


@pytest.mark.parametrize(
    ("reply", "error", "told"),
    [
        (Reply(status=429), "http_429", "refused with 429"),
        (Reply(status=503), "http_503", "refused with 503"),
        (Reply(["a"], ending="cut"), "broken_stream", ""),
        (Reply(["a"], ending="no_done"), "broken_stream", "DONE"),
        (Reply(["a"], ending="error_event"), "error_event", "it broke"),
        (Reply(["a"], ending="hang"), "timeout", "in time"),
        (Reply([], ending="hang"), "timeout", "in time"),
        (Reply(status=307, location="http://example.com/\x1b[2J"), "http_307", "redirects to http://example.com/"),
        (Reply(["a"], event=b"data: " + b"[" * 100_000 + b"\n\n"), "broken_stream", "cannot be read"),
        (Reply(["a"], event=b'data: {"x":' + b"[" * 5000 + b"]" * 5000 + b"}\n\n"), "broken_stream", "cannot be read"),
        (Reply(["a"], event=b'data: {"error":' + b"[" * 700 + b"]" * 700 + b"}\n\n"), "error_event", "[[["),
        (Reply(["a"], event=b'data: {"choices":"\xff"}\n\n'), "broken_stream", "cannot be read"),
        (Reply(["a"], event=b"data: " + b"x" * (3 << 20)), "broken_stream", "over 1 MB"),
        (Reply(["a"], usage={"prompt_tokens": -1, "completion_tokens": 2}), "broken_stream", "cannot be read"),
        (Reply(["a"], usage={"prompt_tokens": 10**400, "completion_tokens": 2}), "broken_stream", "cannot be read"),
        (Reply(["a"], event=b'data: {"choices":[{"del', ending="no_done", usage=None), "broken_stream", "DONE"),
    ],
)
async def test_errors_of_each_kind(reply: Reply, error: str, told: str, tmp_path: Path) -> None:
    """Every other request fails; the others go on as if nothing were."""

    def answer(body: dict[str, Any]) -> Reply:
        return reply if body["max_tokens"] == 7 else counting("a", "b")(body)

    rows = [TraceRow(0.01 * i, 40, 7 if i % 2 else 2) for i in range(10)]
    async with StubTarget(answer) as stub:
        ran = await run(stub, rows, tmp_path, timeout_s=3.0)
    assert ran.errors == [None, error] * 5
    assert ran.conditions.ended == "complete"
    assert list(ran.conditions.error_examples) == [error]
    assert told in ran.conditions.error_examples[error]
    assert ran.conditions.error_examples[error].isprintable()
    for outcome in ran.outcomes:
        if outcome.error is not None:
            assert (outcome.first_token_s is not None) == bool(reply.status == 200 and reply.texts)


async def test_a_share_is_cut_off_by_the_client(tmp_path: Path) -> None:
    async with StubTarget(lambda _: Reply(["x "] * 20, gap_s=0.002)) as stub:
        rows = [TraceRow(0.0, 20, 20)] * 40
        ran = await run(stub, rows, tmp_path, send=SendOptions(cancel_rate=0.5, seed=1))
        await stub.until(lambda: stub.num_cut >= ran.errors.count("cancelled") // 2)  # others were cut after their last chunk
    assert set(ran.errors) == {None, "cancelled"}
    assert 10 <= ran.errors.count("cancelled") <= 30
    lengths = {len(outcome.token_gaps_s) + 1 for outcome in ran.outcomes if outcome.error is not None}
    assert len(lengths) > 3
    assert ran.conditions.error_examples == {"cancelled": ""}


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_key_that_a_server_repeats_is_not_in_the_results(is_first: bool, tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        is_known = body["max_tokens"] == (2 if is_first else 1)
        return counting("x")(body) if is_known else Reply(status=307, location="http://x/?key=hush-hush")

    async with StubTarget(answer) as stub:
        ran = await run(stub, TEXT, tmp_path, headers={"Authorization": "Bearer hush-hush", "X-Short": "x"})
    told = ran.conditions.message if is_first else ran.conditions.error_examples["http_307"]
    assert "redirects to http://x/?key=***" in told


async def test_cuts_are_anywhere_where_several_tokens_come_at_once(tmp_path: Path) -> None:
    """Ten tokens a chunk: a cut after the fifth chunk is one after the fiftieth token."""
    usage = {"prompt_tokens": 10, "completion_tokens": 100}
    async with StubTarget(lambda _: Reply(["x " * 10] * 10, gap_s=0.001, usage=usage)) as stub:
        rows = [TraceRow(0.005 * i, 20, 100) for i in range(100)]
        ran = await run(stub, rows, tmp_path, send=SendOptions(concurrency=4, cancel_rate=0.5, seed=1))
    assert 30 <= ran.errors.count("cancelled") <= 70


async def test_a_body_that_goes_on_after_its_end(tmp_path: Path) -> None:
    """The answer is whole; neither its session nor a place under the cap waits for more."""
    rows = [TraceRow(0.0, 20, 2, session="s", turn=turn) for turn in range(3)]
    async with StubTarget(lambda _: Reply(["x"], ending="late")) as stub:
        ran = await run(stub, rows, tmp_path, timeout_s=60.0, send=SendOptions(concurrency=1))
    assert ran.errors == [None] * 3
    assert max(outcome.end_s for outcome in ran.outcomes) < 30


async def test_ctrl_c_ends_sending_for_those_that_wait(tmp_path: Path) -> None:
    """Whoever waits for a place under the cap, or for the turn before, is not sent any more."""
    rows = [TraceRow(0.0, 20, 2, session="s" if i % 2 else None, turn=i // 2) for i in range(200)]
    async with StubTarget(lambda _: Reply(["x"], delay_s=0.05)) as stub:
        running = asyncio.create_task(run(stub, rows, tmp_path, send=SendOptions(concurrency=2)))
        await stub.until(lambda: len(asked(stub)) >= 4)
        signal.raise_signal(signal.SIGINT)
        ran = await asyncio.wait_for(running, 60)
        num_sent = len(asked(stub))
    assert num_sent < 50
    assert ran.conditions.ended == "interrupted"
    assert ran.errors.count("unfinished") == 200 - num_sent
    assert ran.errors.count(None) == num_sent


async def test_more_requests_than_are_let_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.loadgen.replay.open_loop.MAX_OPEN", 5)
    async with StubTarget(lambda _: Reply(["x"], delay_s=0.05)) as stub:
        ran = await run(stub, [TraceRow(0.0, 20, 2)] * 12, tmp_path)
    assert ran.errors == [None] * 12
    assert any("were open at once" in note for note in ran.conditions.notes)
    assert max(outcome.send_lag_s for outcome in ran.outcomes) > 0.09


async def test_nothing_of_the_trace_is_left(tmp_path: Path) -> None:
    async with StubTarget() as stub:
        ran = await run(stub, [], tmp_path)
    assert (ran.conditions.ended, ran.outcomes) == ("trace_empty", [])
    assert ran.conditions.message.startswith("No request of the trace is left to be sent")


async def test_ctrl_c_on_a_long_way_to_the_start(tmp_path: Path) -> None:
    """Nothing reads the trace any more, or the process would not end."""
    shaping, is_far, has_ended = Shaping(), threading.Event(), threading.Event()

    def endless() -> Iterator[TraceRow]:
        for second in itertools.count():
            if second == 10_000:
                is_far.set()
            yield TraceRow(float(second), 20, 2)

    def rows() -> Iterator[TraceRow]:
        yield from shaped(endless(), TraceOptions(start_s=1e12), shaping)
        has_ended.set()

    async with StubTarget() as stub:
        trace = Trace("t", "workload", rows(), MalformedRows(), shaping=shaping)
        replaying = asyncio.create_task(replay(trace, ReplayOptions(stub.url, tmp_path), Console(file=io.StringIO())))
        assert await asyncio.to_thread(is_far.wait, 30)
        replaying.cancel()
        await asyncio.wait([replaying], timeout=30)
        assert await asyncio.to_thread(has_ended.wait, 30)
    assert read_conditions(tmp_path).ended == "interrupted"


async def test_pictures_beyond_the_cap_are_told(tmp_path: Path) -> None:
    shaping = Shaping()
    rows = shaped(iter([TraceRow(0.0, 200, 2, 3), TraceRow(0.0, 200, 2, 1)]), TraceOptions(max_images=2), shaping)
    async with StubTarget() as stub:
        trace = Trace("t", "workload", rows, MalformedRows(), shaping=shaping)
        options = ReplayOptions(stub.url, tmp_path, pictures=SMALL)
        conditions = await replay(trace, options, Console(file=io.StringIO()))
    note = "1 pictures of 1 requests were left out: these have more in the trace than --max-images allows."
    assert note in conditions.notes


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
async def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Sending ends at once, and it is told."""
    (tmp_path / OUTCOMES_FILE).symlink_to("/dev/full")
    rows = (TraceRow(0.001 * i, 20, 2) for i in range(1_000_000))
    async with StubTarget() as stub:
        options = ReplayOptions(stub.url, tmp_path, pictures=SMALL)
        trace = Trace("t", "triptych", rows, MalformedRows())
        conditions = await asyncio.wait_for(replay(trace, options, Console(file=io.StringIO())), 60)
    assert conditions.ended == "results_broken"
    assert "No space left" in conditions.message


async def test_turns_of_a_session_wait_and_repeat_what_was_said(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 60 + 60 * turn, 5, session="s", turn=turn, num_images=int(turn == 1)) for turn in range(4)]

    def answer(body: dict[str, Any]) -> Reply:
        return Reply([f"answer {len(body['messages']) // 2} ", "ends"], 0.03, 0.01, usage=counting("x", "y")(body).usage)

    async with StubTarget(answer) as stub:
        ran = await run(stub, rows, tmp_path)
        bodies = asked(stub)
    assert ran.errors == [None] * 4
    for turn, body in enumerate(bodies):
        texts = texts_of(body)
        assert len(texts) == 2 * turn + 1
        assert texts[1::2] == [f"answer {number} ends" for number in range(turn)]
        if turn:
            assert body["messages"][:-2] == bodies[turn - 1]["messages"]
    ordered = sorted(ran.outcomes, key=lambda outcome: outcome.index)
    for earlier, later in itertools.pairwise(ordered):
        assert later.scheduled_s == pytest.approx(earlier.end_s, abs=0.02)  # the user has read the answer, and asks
        assert later.send_lag_s < LATE_S
    assert [outcome.num_prompt_tokens for outcome in ordered] == pytest.approx([60, 120, 180, 240], abs=12)


async def test_a_turn_goes_on_after_one_that_failed(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        return Reply(status=500) if body["max_tokens"] == 5 else counting("x")(body)

    rows = [TraceRow(0.0, 60, 5, session="s", turn=0), TraceRow(0.0, 90, 6, session="s", turn=1)]
    async with StubTarget(answer) as stub:
        ran = await run(stub, rows, tmp_path)
        assert len(texts_of(asked(stub)[-1])) == 1
    assert ran.errors == ["http_500", None]


async def test_answers_of_the_world_are_checked(tmp_path: Path) -> None:
    rows = [TraceRow(0.005 * i, 5000, 500, num_images=i % 3) for i in range(60)]

    def answer(body: dict[str, Any]) -> Reply:
        """Right about days, in pieces and with a space before, and about nothing else."""
        days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "Monday"]
        match = re.search(r"What day comes after (\w+)\?", texts_of(body)[0])
        said = days[days.index(match[1]) + 1] if match else "no idea"
        return Reply([" ", said[:2], said[2:]], usage=None)

    async with StubTarget(answer) as stub:
        ran = await run(stub, rows, tmp_path, content="world")
        bodies = [received.body for received in stub.received]
    assert len(bodies) == 60  # nothing is asked before
    assert all("ignore_eos" not in body for body in bodies)
    num_days = sum("What day" in texts_of(body)[0] for body in bodies)
    assert num_days > 0
    assert [outcome.is_right for outcome in ran.outcomes].count(True) == num_days
    assert [outcome.is_right for outcome in ran.outcomes].count(False) == 60 - num_days
    assert "of answers right" in ran.told


async def test_isolated_latencies_and_warm_up(tmp_path: Path) -> None:
    rows = [TraceRow(0.01 * i, 100 + 10 * i, 3) for i in range(20)]
    async with StubTarget(lambda body: Reply(["a", "b", "c"], 0.05, 0.01, usage=counting("a", "b", "c")(body).usage)) as stub:
        send = SendOptions(warm_up_s=0.1)
        ran = await run(stub, rows, tmp_path, slos=parse_slos(["ttft=5x"]), num_isolated=4, send=send)
        times = [received.at_s for received in stub.received]
    assert set(ran.conditions.isolated) == {"text"}
    isolated = ran.conditions.isolated["text"]
    assert isolated.num_requests == 4
    assert 0.05 <= isolated.ttft_s < LATE_S
    assert isolated.tbt_s is not None
    assert isolated.tbt_s >= 0.0095
    assert min(b - a for a, b in itertools.pairwise(times[2:7])) > 0.06  # one after the other
    assert [outcome.is_warm_up for outcome in sorted(ran.outcomes, key=lambda one: one.index)] == [True] * 10 + [False] * 10
    again = await run_again(tmp_path, rows, ran)
    assert again.conditions.isolated == ran.conditions.isolated


async def run_again(folder: Path, rows: list[TraceRow], first: Ran) -> Ran:
    """With the isolated latencies of the first run: none are measured."""
    async with StubTarget() as stub:
        slos = parse_slos(["text:ttft=5x"])
        ran = await run(stub, rows, folder, slos=slos, isolated=read_conditions(folder).isolated)
        assert len(stub.received) == len(rows) + 2
    return ran


async def test_nobody_is_there(tmp_path: Path) -> None:
    async with StubTarget() as stub:
        pass
    ran = await run(stub, TEXT, tmp_path)
    assert (ran.conditions.ended, ran.outcomes) == ("target_unreachable", [])
    assert ran.conditions.message.startswith(f"No server answers at {stub.url}: ")


@pytest.mark.parametrize(
    ("models", "reply", "model", "told"),
    [
        ([], Reply(), None, "names no model: is the server ready?"),
        ([{"id": "x"}], Reply(), "y", "has no model 'y', but x"),
        ([{"id": "x"}], Reply(status=400), None, "http_400, refused with 400"),
    ],
)
async def test_a_target_that_is_no_use(
    models: list[dict[str, Any]], reply: Reply, model: str | None, told: str, tmp_path: Path
) -> None:
    async with StubTarget(lambda _: reply) as stub:
        stub.models = models
        ran = await run(stub, TEXT, tmp_path, model=model)
    assert (ran.conditions.ended, ran.outcomes) == ("target_unreachable", [])
    assert told in ran.conditions.message


@pytest.mark.parametrize(
    ("status", "location", "told"),
    [
        (401, "", "status 401, is the key in OPENAI_API_KEY or --header right?"),
        (503, "", "status 503, is the server ready?"),
        (301, "https://example.com/v1/models", "it redirects to https://example.com/v1/models, is that the target?"),
    ],
)
async def test_a_target_that_lists_nothing(
    status: int, location: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stub: StubTarget, connection: Any, head: bytes, body: bytes) -> None:
        connection.send_json({"data": [{"id": "x"}]}, status, location)

    monkeypatch.setattr(StubTarget, "answer", refuse)
    async with StubTarget() as stub:
        ran = await run(stub, TEXT, tmp_path)
    assert (ran.conditions.ended, ran.outcomes) == ("target_unreachable", [])
    assert told in ran.conditions.message


async def test_a_target_that_knows_no_ignore_eos(tmp_path: Path) -> None:
    """It says so before anything is sent; natural answers do without."""

    def answer(body: dict[str, Any]) -> Reply:
        return Reply(status=400) if "ignore_eos" in body else counting("x")(body)

    async with StubTarget(answer) as stub:
        refused = await run(stub, TEXT, tmp_path)
        assert refused.conditions.ended == "target_unreachable"
        assert "--natural asks without ignore_eos" in refused.conditions.message
        ran = await run(stub, TEXT, tmp_path, is_natural=True)
    assert ran.errors == [None] * len(TEXT)


async def test_a_target_that_dies_midway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.loadgen.replay.run.Watchdog", partial(Watchdog, dead_after_s=0.5))
    rows = (TraceRow(0.01 * i, 20, 2) for i in range(100_000))
    async with StubTarget(lambda _: Reply(["x"], delay_s=0.01)) as stub:
        running = asyncio.create_task(run(stub, rows, tmp_path))
        await stub.until(lambda: len(asked(stub)) >= 30)
        stub.die()
        ran = await asyncio.wait_for(running, 60)
    assert ran.conditions.ended == "target_died"
    assert stub.url in ran.conditions.message
    assert None in ran.errors
    assert ran.errors[-1] == "connection"
    assert set(ran.errors) <= {None, "connection", "broken_stream"}


@pytest.mark.parametrize("takes_pictures", [True, False])
async def test_pictures_that_only_come_later(takes_pictures: bool, tmp_path: Path) -> None:
    """Their tokens are measured before; a target that takes none can still be asked for text."""

    def answer(body: dict[str, Any]) -> Reply:
        has_pictures = not isinstance(body["messages"][0]["content"], str)
        return Reply(status=400) if has_pictures and not takes_pictures else counting("x")(body)

    rows = [*[TraceRow(0.0, 20, 2)] * 1000, *[TraceRow(0.0, 100, 3, num_images=1)] * 3]
    async with StubTarget(answer) as stub:
        send = SendOptions(concurrency=32)
        ran = await run(stub, rows, tmp_path, send=send, pictures=PictureOptions(size=(140, 140)))
    assert ran.errors == [None] * 1000 + [None if takes_pictures else "http_400"] * 3
    if takes_pictures:
        assert [outcome.num_prompt_tokens for outcome in ran.outcomes if outcome.num_images] == pytest.approx([100] * 3, abs=3)


async def test_what_is_emulated_says_so(tmp_path: Path) -> None:
    async with StubTarget() as stub:
        stub.models = [{"id": "llama", "emulated": {"gpu": "a100", "time_scale": 0.5}}]
        await run(stub, TEXT[:2], tmp_path)
    written = json.loads((tmp_path / "conditions.json").read_text())  # whoever reads them has no need of us
    assert (written["ended"], written["model"]) == ("complete", "llama")
    assert written["label"].startswith("emulated a100")
