"""data: URLs as leniently as browsers read them; other schemes."""

from __future__ import annotations

import base64
import contextlib
import random
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.services.router.api_types import ImageInput
from triptych.services.router.data_url import MAX_ESCAPES, ImageSource, decode_data_url, read_source
from triptych.shared.errors import BadRequest

RAW = bytes(range(256)) + b"\xfb\xff\xfe"  # its base64 has + and /
PLAIN = base64.b64encode(RAW).decode()
URL_SAFE = base64.urlsafe_b64encode(RAW).decode()
LINES = "\r\n".join(PLAIN[i : i + 76] for i in range(0, len(PLAIN), 76))


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{PLAIN}",
        f"data:image/png;base64,{PLAIN.rstrip('=')}",
        f"data:;base64,{PLAIN}",
        f"data:image;base64,{PLAIN}",
        f"data:image/jpeg;charset=utf-8;base64,{PLAIN}",
        f"DATA:IMAGE/PNG;BASE64,{PLAIN}",
        f"data:image/png;base64,{LINES}",
        f"data:image/png;base64, {PLAIN} ",
        f"data:image/png;base64,{URL_SAFE}",
        f"data:image/png;base64,{quote(PLAIN, safe='')}",
        f"data:image/png;base64,{quote(LINES, safe='')}",
        "data:image/png;base64," + "".join(f"%{ord(character):02x}" for character in PLAIN),
        f" data:image/png;base64,{PLAIN}\n",
        f'data:image/png;name="a;b.png";charset=utf-8;base64,{PLAIN}',
        f"data:image/png ; base64 ,{PLAIN}",
        f"data:image/png,{quote(RAW, safe='')}",
    ],
)
def test_variants(url: str) -> None:
    assert read_source(ImageInput(url, "p"), 1000) == ImageSource("p", content=RAW)


@pytest.mark.parametrize("num_bytes", [1 << 18, 300_000, 300_001, 300_002])
def test_large_ones_come_in_pieces(num_bytes: int) -> None:
    raw = random.Random(0).randbytes(num_bytes)
    packed = base64.encodebytes(raw).decode()  # lines of 77: no piece ends at a whole number of bytes
    for text in (packed, packed.rstrip("=\n"), packed.replace("\n", ""), quote(packed, safe="")):
        assert decode_data_url(f"data:image/png;base64,{text}", "p") == raw
    with pytest.raises(BadRequest):
        decode_data_url(f"data:image/png;base64,{packed[:300_000]}={packed[300_000:]}", "p")


def test_missing_padding_of_each_length() -> None:
    for count in range(1, 6):
        packed = base64.b64encode(b"x" * count).decode().rstrip("=")
        assert decode_data_url(f"data:image/png;base64,{packed}", "p") == b"x" * count


@pytest.mark.parametrize(
    "url", ["data:", "data:image/png;base64", "data:image/png;base64,", "data:,", "data:x;base64,@@@", "data:x;base64,A"]
)
def test_broken_ones(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_source(ImageInput(url, "messages.[0].content.[0].image_url"), 1000)
    assert caught.value.code == "invalid_image"
    assert caught.value.param == "messages.[0].content.[0].image_url"


@pytest.mark.parametrize("url", ["ftp://a/b.png", "file:///etc/passwd", "javascript:x", "/etc/passwd", "x.png", "http"])
def test_other_schemes(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_source(ImageInput(url, "p"), 1000)
    assert caught.value.status == 400
    assert "passwd" not in caught.value.message


def test_escapes_are_bounded_where_they_cost() -> None:
    """A body full of escapes of anything takes a thousand times its length to decode; those of base64 are cheap."""
    escaped = "%2B%2f" * MAX_ESCAPES
    assert len(decode_data_url(f"data:image/png;base64,{escaped}", "p")) == 2 * MAX_ESCAPES * 3 // 4
    assert len(decode_data_url("data:image/png," + "%41" * MAX_ESCAPES, "p")) == MAX_ESCAPES
    for head in ("data:image/png,", "data:image/png;base64,"):
        with pytest.raises(BadRequest) as caught:
            decode_data_url(head + "%41" * (MAX_ESCAPES + 1), "p")
        assert caught.value.code == "invalid_image"


def test_bounds() -> None:
    with pytest.raises(BadRequest) as caught:
        read_source(ImageInput(f"data:image/png;base64,{PLAIN}", "p"), 100)
    assert caught.value.code == "image_too_large"
    with pytest.raises(BadRequest):
        read_source(ImageInput("http://a/" + "x" * 10_000, "p"), 100)


@pytest.mark.parametrize("url", ["http://a/b.png", "HTTPS://a/b.png", " https://a/b.png "])
def test_urls_are_left_to_preprocess(url: str) -> None:
    assert read_source(ImageInput(url, "p"), 100) == ImageSource("p", url=url.strip())


@given(st.binary(min_size=1, max_size=200), st.booleans())
def test_round_trip(raw: bytes, url_safe: bool) -> None:
    packed = (base64.urlsafe_b64encode if url_safe else base64.b64encode)(raw).decode()
    assert decode_data_url(f"data:image/png;base64,{packed}", "p") == raw


@given(st.text(max_size=60))
def test_anything_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(BadRequest):
        read_source(ImageInput("data:" + text, "p"), 1000)
