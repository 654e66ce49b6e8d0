"""A worker process: what comes back, what it costs, and that whatever happens to it is a typed error or a second try."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from triptych.services.preprocess import decode_process
from triptych.services.preprocess.decode import BROKEN_TEXT, DecodeOptions, decode_image
from triptych.services.preprocess.decode_process import BUSY_TEXT, SLOW_TEXT, DecodedImage, DecodeProcess
from triptych.services.preprocess.decode_worker import MEMORY_TEXT
from triptych.shared.checkpoint import ImageOptions
from triptych.shared.errors import BadRequest, InternalError, Overloaded
from triptych.shared.process_memory import pss_bytes

OPTIONS = DecodeOptions(ImageOptions(14, 2, 2, 3136, 200704, (0.481, 0.457, 0.408), (0.268, 0.261, 0.275)), "rev", 64_000_000)
MEMORY_BYTES = 2 << 30
CPU_S = 30.0
Make = Callable[..., DecodeProcess]


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


PICTURE = _png(Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)))


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[DecodeProcess] = []

    def begin(cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> DecodeProcess:
        made.append(DecodeProcess(cpu_s, memory_bytes))
        made[-1].start()
        return made[-1]

    yield begin
    for process in made:
        process.close()
        assert process.pid is None or not Path(f"/proc/{process.pid}").exists()


def _pid(process: DecodeProcess) -> int:
    assert process.pid is not None
    return process.pid


def _state(pid: int) -> str:
    """Of a process; X when it is gone. A dead one is Z until its parent looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _pixels(decoded: DecodedImage) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.frombuffer(decoded.pixels, np.uint8).reshape(decoded.info.height, decoded.info.width, 3)


def _until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_the_same_as_without_a_process(make: Make) -> None:
    process = make()
    for _ in range(2):
        info, image = decode_image(PICTURE, OPTIONS, "p")
        decoded = process.decode(bytearray(PICTURE), OPTIONS, "p")
        assert decoded.info == info
        assert np.array_equal(_pixels(decoded), np.asarray(image))


def test_refusals_come_back_as_they_are(make: Make) -> None:
    process = make()
    pid = process.pid
    for encoded, text in ((PICTURE[:-100], BROKEN_TEXT), (b"", None)):
        with pytest.raises(BadRequest) as caught:
            process.decode(encoded, OPTIONS, "messages.[0]")
        assert (caught.value.code, caught.value.param) == ("invalid_image", "messages.[0]")
        assert text in (None, caught.value.message)
    assert process.decode(PICTURE, OPTIONS, "p").info.num_tokens
    assert process.pid == pid


def test_a_worker_is_light(make: Make) -> None:
    process = make()
    process.decode(PICTURE, OPTIONS, "p")
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert not [name for name in ("torch", "numpy", "fastapi", "uvloop") if name in maps]
    assert pss_bytes(_pid(process)) < 40 << 20


def test_no_picture_leaves_anything_open(make: Make) -> None:
    process = make()
    process.decode(PICTURE, OPTIONS, "p")
    folders = ["/proc/self/fd", f"/proc/{process.pid}/fd"]
    before = [len(os.listdir(folder)) for folder in folders]
    for encoded in (PICTURE, PICTURE[:-100], PICTURE):
        try:
            _pixels(process.decode(encoded, OPTIONS, "p"))
        except BadRequest:
            continue
    assert [len(os.listdir(folder)) for folder in folders] == before


def test_too_much_memory_is_the_pictures_fault(make: Make) -> None:
    process = make(memory_bytes=160 << 20)
    pid = process.pid
    with pytest.raises(BadRequest) as caught:
        process.decode(_png(Image.new("RGBA", (6000, 6000))), OPTIONS, "p")
    assert (caught.value.code, caught.value.message, caught.value.param) == ("image_too_large", MEMORY_TEXT, "p")
    assert process.decode(PICTURE, OPTIONS, "p").info.num_tokens
    assert process.pid == pid


def test_too_much_cpu_time_is_the_pictures_fault(make: Make) -> None:
    """The limit counts from the picture's own begin, in whole seconds: some pictures later it is as far away as before."""
    process = make(cpu_s=0.1)
    pid = process.pid
    with pytest.raises(BadRequest) as caught:
        process.decode(_png(Image.new("LA", (8000, 8000))), OPTIONS, "p")
    assert (caught.value.code, caught.value.message, caught.value.param) == ("invalid_image", SLOW_TEXT, "p")
    assert process.decode(PICTURE, OPTIONS, "p").info.num_tokens
    assert process.pid != pid


def test_a_worker_that_gets_no_cpu_is_given_up(make: Make) -> None:
    process = make(cpu_s=0.2)
    pid = _pid(process)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(Overloaded) as caught:
        process.decode(PICTURE, OPTIONS, "p")
    assert caught.value.message == BUSY_TEXT
    assert not Path(f"/proc/{pid}").exists()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts the jobs that are in a worker's socket."""
    counter = threading.Semaphore(0)
    send_fds = socket.send_fds

    def send(*arguments: object) -> int:
        num_bytes = send_fds(*arguments)  # type: ignore[arg-type]
        counter.release()
        return num_bytes

    monkeypatch.setattr(decode_process.socket, "send_fds", send)
    return counter


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_a_picture_whose_worker_is_killed_gets_another_one(
    make: Make, sent: threading.Semaphore, thread: ThreadPoolExecutor
) -> None:
    process = make()
    pid = _pid(process)
    os.kill(pid, signal.SIGSTOP)
    decoding = thread.submit(process.decode, PICTURE, OPTIONS, "p")
    assert sent.acquire(timeout=20)
    os.kill(pid, signal.SIGKILL)
    assert decoding.result(20).info.num_tokens
    assert process.pid != pid


def test_a_picture_that_ends_every_worker_is_given_up(
    monkeypatch: pytest.MonkeyPatch, make: Make, sent: threading.Semaphore, thread: ThreadPoolExecutor
) -> None:
    process = make()
    start = process.start

    def start_stopped() -> socket.socket:
        jobs = start()
        os.kill(_pid(process), signal.SIGSTOP)
        return jobs

    monkeypatch.setattr(process, "start", start_stopped)
    decoding: Future[DecodedImage] = thread.submit(process.decode, PICTURE, OPTIONS, "p")
    for _ in range(2):
        assert sent.acquire(timeout=20)
        os.kill(_pid(process), signal.SIGSEGV)
        os.kill(_pid(process), signal.SIGCONT)
    with pytest.raises(InternalError) as caught:
        decoding.result(20)
    assert "image" in caught.value.message
    monkeypatch.undo()
    assert process.decode(PICTURE, OPTIONS, "p").info.num_tokens


def test_an_idle_worker_that_was_killed_costs_no_try(make: Make, sent: threading.Semaphore) -> None:
    process = make()
    pid = _pid(process)
    os.kill(pid, signal.SIGKILL)
    _until(lambda: _state(pid) == "Z")
    assert process.decode(PICTURE, OPTIONS, "p").info.num_tokens
    assert sent.acquire(blocking=False)
    assert not sent.acquire(blocking=False)


def test_signals_to_the_group_are_for_the_parent(make: Make) -> None:
    process = make()
    process.decode(PICTURE, OPTIONS, "p")
    pid = _pid(process)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    process.decode(PICTURE, OPTIONS, "p")
    assert process.pid == pid


def test_closing_ends_a_picture_under_way(make: Make, sent: threading.Semaphore, thread: ThreadPoolExecutor) -> None:
    process = make()
    os.kill(_pid(process), signal.SIGSTOP)
    decoding = thread.submit(process.decode, PICTURE, OPTIONS, "p")
    assert sent.acquire(timeout=20)
    process.close()
    with pytest.raises(Overloaded):
        decoding.result(20)
    with pytest.raises(Overloaded):
        process.start()


OWNER = """
import resource, time
from triptych.services.preprocess.decode import DecodeOptions
from triptych.services.preprocess.decode_process import DecodeProcess
from triptych.shared.checkpoint import ImageOptions
from triptych.shared.errors import BadRequest
resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
process = DecodeProcess(1000.0, 1 << 40)
try:
    process.decode(b"", DecodeOptions(ImageOptions(14, 2, 2, 1, 1, (0.5,) * 3, (0.5,) * 3), "", 1), "")
except BadRequest:
    print(process.pid, flush=True)
time.sleep(60)
"""


def test_a_worker_dies_with_its_parent() -> None:
    """Also when both have no time to say good-bye. (Stricter limits of the machine are kept to.)"""
    with subprocess.Popen([sys.executable, "-P", "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        owner.kill()
    _until(lambda: _state(pid) in "XZ")
