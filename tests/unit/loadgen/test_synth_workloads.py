"""Workloads: the fixed ones stay as they are, files of users are checked, what is scripted happens."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from triptych.loadgen.synth.commands import WORKLOADS
from triptych.loadgen.synth.rows import workload_rows
from triptych.loadgen.synth.scaling import Wishes, as_wished
from triptych.loadgen.synth.workload import Workload, load_workload, workload_names
from triptych.loadgen.traces.open import open_trace
from triptych.loadgen.traces.own import own_line
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import TraceError, TraceOptions

# Rows and the digest of the first thousand: results are compared by the names of these, so they must not change.
FIXED = {
    "bursts": (1208, "6bd7e769492c75fb"),
    "chat-reuse": (763, "a4f92dca2aba0bd5"),
    "day": (3363, "c22dc1e5027d67d5"),
    "image-light": (1221, "f15fb0e79c679c4f"),
    "tides": (2334, "8f5c9add02a3e3f6"),
}
MINIMAL = 'about = "a"\nduration_s = 10\n[[client]]\nname = "c"\nrate_per_s = 5\noutput_tokens = { 50 = 3 }\n'


def rows_of(name: str) -> list[TraceRow]:
    return list(workload_rows(load_workload(name)))


def test_the_fixed_ones_are_there() -> None:
    assert all(f"{name}, " in WORKLOADS for name in workload_names())
    assert workload_names() == ("azure-lmm", "bursts", "chat-reuse", "day", "image-light", "servegen", "tides")


@pytest.mark.parametrize("name", ["bursts", "chat-reuse", "day", "image-light", "tides"])
def test_the_fixed_ones_do_not_change(name: str) -> None:
    rows = rows_of(name)
    digest = blake3("\n".join(map(own_line, rows[:1000])).encode()).hexdigest()[:16]
    assert (len(rows), digest) == FIXED[name]


@pytest.mark.parametrize("name", ["azure-lmm", "bursts", "chat-reuse", "day", "image-light", "servegen", "tides"])
def test_rows_make_sense(name: str) -> None:
    workload = load_workload(name)
    rows = list(open_trace(name, TraceOptions(limit=2000, max_images=None)))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(rows))
    assert 0 <= rows[0].arrival_s <= rows[-1].arrival_s < workload.duration_s
    for row in rows:
        assert row.num_output_tokens >= 1
        assert row.num_context_tokens >= max(1, row.num_image_tokens or 0)
        assert len(row.prefix_ids) == (row.num_context_tokens // row.prefix_block_size if row.session else 0)


def test_bursts_burst() -> None:
    """As its file says: pictures come five times as often from 60 s on, four times as many a request from 150 s, then text."""
    rows = rows_of("bursts")

    def per_s(request_class: str, start_s: float, end_s: float) -> float:
        return sum(row.request_class == request_class and start_s <= row.arrival_s < end_s for row in rows) / (end_s - start_s)

    def images(start_s: float, end_s: float) -> float:
        counts = [row.num_images for row in rows if row.num_images and start_s <= row.arrival_s < end_s]
        return sum(counts) / len(counts)

    assert per_s("image", 60, 90) > 3 * per_s("image", 0, 60)
    assert images(150, 180) > 3 * images(0, 150)
    assert per_s("text", 230, 250) > 3 * per_s("text", 0, 230)


def test_image_light_is_light() -> None:
    rows = rows_of("image-light")
    assert sum(row.num_images > 0 for row in rows) / len(rows) == pytest.approx(0.05, abs=0.02)


def test_conversations_reuse_what_was_said() -> None:
    """Each turn's prompt begins with the whole prompt of the turn before; all begin with the system prompt of their client."""
    conversations: dict[str, list[TraceRow]] = {}
    for row in rows_of("chat-reuse"):
        assert row.session is not None
        conversations.setdefault(row.session, []).append(row)
    assert len(conversations) > 100
    longer = [turns for turns in conversations.values() if len(turns) > 1]
    assert len(longer) > len(conversations) / 2
    for turns in conversations.values():
        assert [row.turn for row in turns] == list(range(len(turns)))
        assert not any(row.num_images for row in turns[1:])
        for before, after in pairwise(turns):
            assert after.num_context_tokens > before.num_context_tokens + before.num_output_tokens
            assert after.prefix_ids[: len(before.prefix_ids)] == before.prefix_ids
    for client in ("chat", "pictures"):
        firsts = [turns[0].prefix_ids for name, turns in conversations.items() if name.startswith(client)]
        assert len({ids[:16] for ids in firsts}) == 1  # 256 tokens
        assert len({ids[16] for ids in firsts if len(ids) > 16}) == len([ids for ids in firsts if len(ids) > 16])


def test_half_of_the_pictures_are_known() -> None:
    """All that an earlier conversation asked about, of the same sizes; what is not about pictures stays as without reuse."""
    workload = as_wished(load_workload("chat-reuse"), Wishes(duration_s=6000))
    rows = list(workload_rows(workload))
    first: dict[tuple[int, ...], TraceRow] = {}
    num_known = 0
    for row in rows:
        assert len(row.image_ids) == row.num_images
        if row.image_ids:
            num_known += row.image_ids in first
            assert first.setdefault(row.image_ids, row).num_image_tokens == row.num_image_tokens
    assert num_known / (num_known + len(first)) == pytest.approx(0.5, abs=0.08)  # 600 conversations: four sigma
    names = [name for ids in first for name in ids]
    assert len(names) == len(set(names))
    without = [msgspec.structs.replace(client, image_reuse=0.0) for client in workload.client]
    plain = workload_rows(msgspec.structs.replace(workload, client=tuple(without)))
    assert [row.arrival_s for row in plain if row.turn == 0] == [row.arrival_s for row in rows if row.turn == 0]


def test_seeds() -> None:
    workload = as_wished(load_workload("azure-lmm"), Wishes(duration_s=600))
    first, again = list(workload_rows(workload)), list(workload_rows(workload))
    assert first == again
    other = list(workload_rows(as_wished(workload, Wishes(seed=5))))
    assert [row.arrival_s for row in other[:50]] != [row.arrival_s for row in first[:50]]


def test_one_client_does_not_change_another() -> None:
    both = load_workload("bursts")
    alone = msgspec.structs.replace(both, client=both.client[:1])
    assert list(workload_rows(alone)) == [row for row in workload_rows(both) if not row.num_images]


@pytest.mark.parametrize(
    ("wishes", "rate", "share"),
    [
        (Wishes(rate_per_s=20, duration_s=300), 20, None),
        (Wishes(rate_per_s=20, image_share=0.2, duration_s=300), 20, 0.2),
        (Wishes(rate_per_s=20, image_share=0.0, duration_s=300), 20, 0.0),
        (Wishes(rate_per_s=20, image_share=1.0, duration_s=300, is_steady=True), 20, 1.0),
    ],
)
def test_wishes(wishes: Wishes, rate: float, share: float | None) -> None:
    rows = list(workload_rows(as_wished(load_workload("bursts"), wishes)))
    assert len(rows) / 300 == pytest.approx(rate, abs=4 * (rate / 300) ** 0.5)  # Poisson: four sigma
    if share is not None:
        assert sum(row.num_images > 0 for row in rows) / len(rows) == pytest.approx(share, abs=0.03)


def test_wishes_that_cannot_be() -> None:
    with pytest.raises(TraceError, match="needs clients of both kinds"):
        as_wished(load_workload("servegen"), Wishes(image_share=0.5))


def test_a_steady_workload_is_steady() -> None:
    workload = as_wished(load_workload("bursts"), Wishes(is_steady=True, rate_per_s=10))
    by_minute = Counter(int(row.arrival_s // 60) for row in workload_rows(workload))
    assert max(by_minute.values()) < 1.3 * min(by_minute.values())  # sigma: 24 of 600


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINIMAL + "text_tokens = { 50 = 100 }\n")
    trace = open_trace(path)
    rows = list(trace)
    assert trace.form == "workload"
    assert {(row.num_context_tokens, row.num_output_tokens) for row in rows} == {(100, 3)}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("about = 3", "Expected `str`, got `int` - at `$.about`"),
        ("about =", "mine.toml"),
        (MINIMAL, "client c: either context_tokens or text_tokens"),
        (MINIMAL + "text_tokens = { 50 = 100 }\nimages = { 1 = 1 }\n", "image_tokens go with images"),
        (MINIMAL + "text_tokens = { 50 = 1 }\nimage_reuse = 0.5\n", "image_reuse goes with image_tokens"),
        (MINIMAL + 'context_tokens = "azure"\n', "sizes 'azure' are not one of azure-lmm-image-context"),
        (MINIMAL + 'context_tokens = { 50 = 9 }\nimages = "many"\n', "counts 'many' are not one of azure-lmm"),
        (MINIMAL + "text_tokens = { 50 = 0 }\n", "percentiles are of 0 to 100"),
        (MINIMAL + "text_tokens = { 50 = 1 }\nsurge = 2\n", "Expected `float` <= 1.0 - at `$.client[0].surge`"),
        (MINIMAL + 'text_tokens = { 50 = 1 }\nhours = "mars"\n', "hours 'mars' is not one of azure-lmm-image"),
        (MINIMAL + "text_tokens = { 50 = 1 }\nrte = 2\n", "unknown field `rte`"),
        (MINIMAL.replace("5", "-5", 1) + "text_tokens = { 50 = 1 }\n", "Expected `float` > 0.0 - at `$.client[0].rate_per_s`"),
        (MINIMAL.replace("5", "nan", 1) + "text_tokens = { 50 = 1 }\n", "`$.client[0].rate_per_s`"),
        (MINIMAL + "text_tokens = { 50 = 1 }\ncv = inf\n", "`$.client[0].cv`"),
        (MINIMAL + "text_tokens = { 50 = inf }\n", "percentiles are of 0 to 100"),
        (MINIMAL + "text_tokens = { 50 = 1 }\nburst = [{ start_s = -1, duration_s = 1 }]\n", "`$.client[0].burst[0].start_s`"),
        ("duration_s = inf\n" + MINIMAL.replace("duration_s", "day_s"), "`$.duration_s`"),
        ("x = " + "[" * 10_000, "mine.toml"),
        ('about = "a"\nduration_s = 10\nclient = []\n', "1 to 16 clients"),
    ],
)
def test_files_with_mistakes(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    assert told in str(caught.value)


def test_no_such_file() -> None:
    with pytest.raises(TraceError, match="no such file"):
        open_trace("nowhere.toml")


def test_files_are_small() -> None:
    folder = Path(load_workload.__code__.co_filename).parents[1] / "workloads"
    assert sum(path.stat().st_size for path in folder.glob("*.toml")) < 20_000


def test_workload_round_trip() -> None:
    """A workload is plain data: what is read from a file can be written as one."""
    workload = load_workload("chat-reuse")
    assert msgspec.json.decode(msgspec.json.encode(workload), type=Workload) == workload
