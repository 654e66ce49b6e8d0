"""Counting scans: files that make the decoder work for minutes are told from all that encoders write."""

from __future__ import annotations

import io
import re

import pytest
from PIL import Image

from triptych.services.preprocess.decode import SCANS_TEXT, DecodeOptions, decode_image
from triptych.services.preprocess.jpeg_scans import MAX_SCANS, MAX_SEGMENTS, has_too_many_scans
from triptych.shared.checkpoint import ImageOptions
from triptych.shared.errors import BadRequest

OPTIONS = DecodeOptions(ImageOptions(14, 2, 2, 3136, 200704, (0.5,) * 3, (0.5,) * 3), "rev", 1_000_000)


def _jpeg(**options: object) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((200, 120), 90).convert("RGB").save(buffer, "JPEG", **options)
    return buffer.getvalue()


def _with_more_scans(num_more: int) -> bytes:
    """A progressive file whose last scan comes again and again."""
    encoded = _jpeg(progressive=True)
    last = encoded[[found.start() for found in re.finditer(b"\xff\xda", encoded)][-1] : -2]
    return encoded[:-2] + last * num_more + encoded[-2:]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"progressive": True},
        {"quality": 100, "progressive": True},
        {"restart_marker_rows": 1},
        {"optimize": True, "quality": 1},
    ],
)
def test_ordinary_files(options: dict[str, object]) -> None:
    assert not has_too_many_scans(_jpeg(**options))


def test_bound_is_exact() -> None:
    num_scans = len(re.findall(b"\xff\xda", _jpeg(progressive=True)))
    assert not has_too_many_scans(_with_more_scans(MAX_SCANS - num_scans))
    assert has_too_many_scans(_with_more_scans(MAX_SCANS - num_scans + 1))


def test_decoder_refuses_them() -> None:
    with pytest.raises(BadRequest) as caught:
        decode_image(_with_more_scans(MAX_SCANS), OPTIONS, "p")
    assert (caught.value.code, caught.value.message, caught.value.param) == ("invalid_image", SCANS_TEXT, "p")


def test_what_looks_like_scans_elsewhere_does_not_count() -> None:
    """In a comment, and in a film that a phone appended to the picture."""
    encoded = _jpeg(progressive=True)
    fake = b"\xff\xda\0\2" * 200
    comment = b"\xff\xfe" + (len(fake) + 2).to_bytes(2, "big") + fake
    marked = encoded[:2] + comment + encoded[2:] + fake
    assert not has_too_many_scans(marked)
    assert decode_image(marked, OPTIONS, "p")[0] == decode_image(encoded, OPTIONS, "p")[0]


def test_endless_segments_end() -> None:
    encoded = _jpeg()
    assert has_too_many_scans(encoded[:2] + b"\xff\xfe\0\2" * (MAX_SEGMENTS + 1) + encoded[2:])


@pytest.mark.parametrize(
    "encoded", [b"", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xda", b"\xff\xd8\xff\xfe\xff\xff", bytes(100)]
)
def test_broken_files_are_left_to_the_decoder(encoded: bytes) -> None:
    assert not has_too_many_scans(encoded)
