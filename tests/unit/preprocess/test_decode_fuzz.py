"""Hostile files through a real worker: whatever comes in, out comes a picture or a typed refusal, the worker lives, and it
never takes more memory or time than it may."""

from __future__ import annotations

import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from support.odd_pictures import ODD, exif, file, noise, png_chunk
from triptych.services.preprocess.decode import DecodeOptions
from triptych.services.preprocess.decode_process import DecodeProcess
from triptych.shared.checkpoint import ImageOptions
from triptych.shared.errors import BadRequest

OPTIONS = DecodeOptions(ImageOptions(14, 2, 2, 3136, 200704, (0.5,) * 3, (0.5,) * 3), "rev", 1_000_000)
MEMORY_BYTES = 256 << 20  # address space; an idle worker has 30 MB
CPU_S = 5.0
CODES = {"invalid_image", "image_too_large"}

_PICTURE = noise(60, 44)
_FRAMES = [noise(60, 44, seed) for seed in range(1, 4)]
SEEDS = {
    "jpeg": file(_PICTURE, "JPEG", exif=exif(6)),
    "progressive": file(_PICTURE, "JPEG", progressive=True, icc_profile=bytes(300)),
    "png": file(_PICTURE.convert("RGBA"), exif=exif(3)),
    "palette": file(_PICTURE.convert("P"), transparency=3),
    "apng": file(_PICTURE, save_all=True, append_images=_FRAMES),
    "webp": file(_PICTURE, "WEBP", exif=exif(8)),
    "lossless": file(_PICTURE.convert("RGBA"), "WEBP", lossless=True, save_all=True, append_images=_FRAMES),
    "gif": file(_PICTURE, "GIF", save_all=True, append_images=_FRAMES),
    "bmp": file(_PICTURE, "BMP"),
    "mpo": file(_PICTURE, "MPO", save_all=True, append_images=_FRAMES),
    **{name: ODD[name][0] for name in ("grey 16 bits key", "palette 2 bits alphas", "cmyk jpeg", "rgb 16 bits key")},
}


@pytest.fixture(scope="module")
def process() -> Iterator[DecodeProcess]:
    made = DecodeProcess(CPU_S, MEMORY_BYTES)
    made.start()
    yield made
    made.close()


def _peak_bytes(process: DecodeProcess) -> int:
    [line] = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmPeak")]
    return int(line.split()[1]) * 1024


def _decode(process: DecodeProcess, encoded: bytes) -> str:
    """`ok`, or the code of the refusal."""
    try:
        decoded = process.decode(encoded, OPTIONS, "p")
    except BadRequest as error:
        refused = error
    else:
        assert len(decoded.pixels) == decoded.info.height * decoded.info.width * 3 <= 200704 * 3
        return "ok"
    assert refused.code in CODES
    assert refused.param == "p"
    assert not any(word in refused.message for word in (" at 0x", "BytesIO", "PIL", "Error", "/"))
    return refused.code


def _mutated(encoded: bytes, other: bytes, rng: random.Random) -> bytes:
    """A few of: bytes and numbers overwritten, ranges cut out, doubled, or taken from another file."""
    data = bytearray(encoded)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(min(len(data), 200) + 1)
        length = rng.choice((1, 2, 4, 30, 400))
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                form, most = rng.choice(((">I", 1 << 32), ("<I", 1 << 32), (">H", 1 << 16), ("<H", 1 << 16)))
                number = rng.choice((0, 1, most - 1, most // 2, rng.randrange(most)))
                data[at : at + struct.calcsize(form)] = struct.pack(form, number)
            case 2:
                del data[at : at + length]
            case 3:
                data[at:at] = data[at : at + length] * rng.choice((1, 2, 50))
            case 4:
                data[at : at + length] = other[at : at + length]
            case 5:
                del data[at + 1 :]
    return _with_right_sums(data) if data[:4] == b"\x89PNG" and rng.random() < 0.7 else bytes(data)


def _with_right_sums(data: bytearray) -> bytes:
    """A PNG whose chunks have the right checksums: else most damage ends there."""
    at = 8
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if end + 4 > len(data):
            break
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[at + 4 : end]))
        at = end + 4
    return bytes(data)


@pytest.mark.parametrize("num_files", [1500, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_files(process: DecodeProcess, num_files: int) -> None:
    rng = random.Random(num_files)
    pid = process.pid
    ends: Counter[str] = Counter()
    slowest_s = 0.0
    for number in range(num_files):
        name, other = rng.choice(list(SEEDS)), rng.choice(list(SEEDS))
        encoded = _mutated(SEEDS[name], SEEDS[other], rng)
        begun_at_s = time.monotonic()
        ends[_decode(process, encoded)] += 1
        slowest_s = max(slowest_s, time.monotonic() - begun_at_s)
        assert process.pid == pid, f"file {number}, made from {name}, ended its worker"
    assert ends["ok"] > num_files / 20
    assert ends["invalid_image"] > num_files / 20
    assert slowest_s < CPU_S
    assert _peak_bytes(process) <= MEMORY_BYTES


def _zeros(num_bytes: int) -> bytes:
    return zlib.compress(bytes(num_bytes), 9)


def _png_with(*extra: bytes, after: bytes = b"") -> bytes:
    """A good picture with more chunks before and behind its pixels."""
    plain = file(Image.new("RGB", (8, 8)))
    return plain[:33] + b"".join(extra) + plain[33:-12] + after + plain[-12:]


def _bombs() -> dict[str, bytes]:
    text = png_chunk(b"zTXt", b"a\0\0" + _zeros(60 << 20))
    international = png_chunk(b"iTXt", b"a\0\1\0\0\0" + _zeros(60 << 20))
    screen = bytearray(file(Image.new("P", (8, 8)), "GIF"))
    screen[6:10] = b"\xff\xff\xff\xff"
    lossy = bytearray(file(Image.new("RGB", (8, 8)), "WEBP"))
    lossy[26:30] = b"\xff\x3f\xff\x3f"
    bitmap = bytearray(file(Image.new("RGB", (8, 8)), "BMP"))
    bitmap[18:26] = struct.pack("<ii", 1 << 30, 1 << 30)
    frames = [Image.new("P", (500, 500), index % 256) for index in range(1000)]
    return {
        "pixels": file(Image.new("1", (12_000, 12_000))),
        "compressed text": _png_with(text),
        "compressed text behind": _png_with(after=text),
        "much compressed text": _png_with(*[png_chunk(b"zTXt", b"a\0\0" + _zeros(1 << 20))] * 200),
        "international text": _png_with(international),
        "profile": _png_with(png_chunk(b"iCCP", b"a\0\0" + _zeros(60 << 20))),
        "more pixels than it says": file(Image.new("RGB", (8, 8))).replace(struct.pack(">II", 8, 8), struct.pack(">II", 8, 1)),
        "gif screen": bytes(screen),
        "gif frames": file(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "webp size": bytes(lossy),
        "bmp size": bytes(bitmap),
        "jpeg size": file(noise(16, 16), "JPEG").replace(b"\x08\0\x10\0\x10", b"\x08\xff\xff\xff\xff", 1),
    }


BOMBS = _bombs()
LARGE = ("pixels", "gif screen", "webp size", "bmp size", "jpeg size")  # by their own headers


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(process: DecodeProcess, name: str) -> None:
    """Small files that want to be large; the worker has 256 MB and lives."""
    pid = process.pid
    expected = "image_too_large" if name in LARGE else "ok" if name == "gif frames" else "invalid_image"
    assert _decode(process, BOMBS[name]) == expected
    assert process.pid == pid
    assert _peak_bytes(process) <= MEMORY_BYTES
