"""Decoding: what odd files look like to the model, which are refused and how, and the same pixels as transformers."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from support.odd_pictures import GREY, png
from triptych.services.preprocess.decode import (
    BROKEN_TEXT,
    EMPTY_TEXT,
    UNKNOWN_TEXT,
    DecodeOptions,
    canonical_rgb,
    decode_image,
)
from triptych.shared.checkpoint import ImageOptions
from triptych.shared.errors import BadRequest
from triptych.shared.image_info import ImageInfo

pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")  # as DecodePool does
IMAGE = ImageOptions(14, 2, 2, 56 * 56, 448 * 448, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
OPTIONS = DecodeOptions(IMAGE, model_revision="rev", max_image_pixels=64_000_000)
PARAM = "messages.[0].content.[1].image_url"
WHITE, BLACK, RED, LIME, BLUE = (255, 255, 255), (0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)
FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP"]


def _file(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def _noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


class Decoded(NamedTuple):
    info: ImageInfo
    pixels: npt.NDArray[np.uint8]


def _decode(encoded: bytes, options: DecodeOptions = OPTIONS) -> Decoded:
    info, image = decode_image(encoded, options, PARAM)
    assert image.mode == "RGB"
    return Decoded(info, np.asarray(image))


def _canonical(encoded: bytes) -> npt.NDArray[np.uint8]:
    image = canonical_rgb(encoded, OPTIONS, PARAM)
    assert image.mode == "RGB"
    return np.asarray(image)


def _colours(encoded: bytes) -> set[tuple[int, ...]]:
    return {tuple(int(value) for value in pixel) for pixel in _canonical(encoded).reshape(-1, 3)}


def _refusal(encoded: bytes, options: DecodeOptions = OPTIONS) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        _decode(encoded, options)
    assert caught.value.param == PARAM
    assert caught.value.status == 400
    assert "0x" not in caught.value.message
    assert "BytesIO" not in caught.value.message
    return caught.value


# --- same pixels as transformers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": IMAGE.min_pixels, "longest_edge": IMAGE.max_pixels},
        image_mean=list(IMAGE.image_mean),
        image_std=list(IMAGE.image_std),
    )


def test_pixels_are_bit_equal_to_the_models_own_processor(processor: Qwen2VLImageProcessorPil) -> None:
    rng = np.random.default_rng(7)
    sizes = [(int(w), int(h)) for w, h in rng.integers(1, 700, (60, 2))] + [(448, 448), (56, 56), (2, 2), (1, 100), (100, 1)]
    for index, (width, height) in enumerate(sizes):
        if max(width, height) > 200 * min(width, height):
            continue
        picture = _noise(width, height, index)
        decoded = _decode(_file(picture))
        theirs = processor(images=picture, return_tensors="np")
        ours = processor(images=decoded.pixels, do_resize=False, return_tensors="np")
        assert np.array_equal(ours["pixel_values"], theirs["pixel_values"]), (width, height)
        assert decoded.info.grid_thw == tuple(theirs["image_grid_thw"][0])
        assert decoded.pixels.shape == (decoded.info.height, decoded.info.width, 3)
        assert decoded.info.num_tokens == len(theirs["pixel_values"]) // 4


# --- odd but good files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(orientation: int, format: str) -> None:
    picture = _noise(40, 24)
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = _file(picture, format, exif=exif.tobytes(), **({"lossless": True} if format == "WEBP" else {}))
    with Image.open(io.BytesIO(encoded)) as opened:
        upright = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
        stored = np.asarray(opened.convert("RGB"))
    assert np.array_equal(_canonical(encoded), upright)
    assert np.array_equal(upright, stored) == (orientation == 1)


def test_rotated_file_and_upright_file_have_one_identity() -> None:
    picture = _noise(40, 24)
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated = _file(picture, exif=exif.tobytes())
    upright = _file(picture.transpose(Image.Transpose.ROTATE_270))
    assert _decode(rotated).info == _decode(upright).info


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0junk", b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0"]
)
def test_broken_exif_does_not_matter(exif: bytes) -> None:
    picture = Image.new("RGB", (8, 8), RED)
    assert len(_colours(_file(picture, "JPEG", exif=exif))) == 1
    assert _colours(_file(picture, "PNG", exif=exif)) == {RED}


def _palette(colours: list[tuple[int, int, int]]) -> Image.Image:
    image = Image.new("P", (8, 8))
    image.putpalette([value for colour in colours for value in colour])
    return image


ON_WHITE = {
    "rgba": _file(Image.new("RGBA", (8, 8), (0, 0, 0, 0))),
    "webp": _file(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), "WEBP", lossless=True),
    "la": _file(Image.new("LA", (8, 8), (0, 0))),
    "palette index": _file(_palette([BLACK] * 256), transparency=0),
    "palette alphas": _file(_palette([BLACK] * 256), transparency=bytes(256)),
    "gif index": _file(_palette([BLACK] * 256), "GIF", transparency=0),
    "grey key": _file(Image.new("L", (8, 8), 7), transparency=7),
    "bit key": _file(Image.new("1", (8, 8), 0), transparency=0),
    "rgb key": _file(Image.new("RGB", (8, 8), (1, 2, 3)), transparency=(1, 2, 3)),
    "grey16 key": _file(Image.fromarray(np.full((8, 8), 777, np.uint16)), transparency=777),
}


@pytest.mark.parametrize("name", ON_WHITE)
def test_transparent_is_white(name: str) -> None:
    assert _colours(ON_WHITE[name]) == {WHITE}


def test_half_transparent_is_mixed_with_white() -> None:
    assert _colours(_file(Image.new("RGBA", (8, 8), (0, 0, 0, 128)))) == {(127, 127, 127)}


OPAQUE = {
    "cmyk": (_file(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100), RED),
    "bits": (_file(Image.new("1", (8, 8), 1)), WHITE),
    "grey": (_file(Image.new("L", (8, 8), 90)), (90, 90, 90)),
    "palette": (_file(_palette([LIME] + [BLACK] * 255)), LIME),
    "bmp palette": (_file(_palette([LIME] + [BLACK] * 255), "BMP"), LIME),
    "bmp": (_file(Image.new("RGB", (8, 8), BLUE), "BMP"), BLUE),
    "grey16": (_file(Image.fromarray(np.full((8, 8), 0x5AFF, np.uint16))), (0x5A, 0x5A, 0x5A)),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_other_modes_become_rgb(name: str) -> None:
    encoded, colour = OPAQUE[name]
    assert _colours(encoded) == {colour}


def test_16_bit_grey_keeps_all_its_levels() -> None:
    ramp = np.tile(np.linspace(0, 65535, 256, dtype=np.uint16), (4, 1))
    assert np.array_equal(_canonical(_file(Image.fromarray(ramp)))[..., 1], (ramp >> 8).astype(np.uint8))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_animations_are_their_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (9, 9), colour) for colour in (RED, LIME, BLUE)]
    encoded = _file(
        frames[0], format, save_all=True, append_images=frames[1:], **({"lossless": True} if format == "WEBP" else {})
    )
    assert _colours(encoded) == {RED}


def test_pictures_of_several_pictures_are_their_first() -> None:
    """Phones write MPO files and call them JPEG."""
    frames = [Image.new("RGB", (16, 16), colour) for colour in (WHITE, BLACK)]
    assert _colours(_file(frames[0], "MPO", save_all=True, append_images=frames[1:])) == {WHITE}


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 100), (200, 1)])
def test_tiny_pictures_are_scaled_up(size: tuple[int, int]) -> None:
    decoded = _decode(_file(Image.new("RGB", size, RED)))
    assert decoded.info.num_tokens >= 4
    assert {tuple(pixel) for pixel in decoded.pixels.reshape(-1, 3).tolist()} == {RED}


# --- identity ---------------------------------------------------------------------------------------------------------------


def _identity(encoded: bytes, options: DecodeOptions = OPTIONS) -> bytes:
    return _decode(encoded, options).info.mm_hash


def test_pictures_that_share_their_raw_bytes_have_their_own_identities() -> None:
    values = np.random.default_rng(0).integers(0, 256, (30, 100, 3), dtype=np.uint8)
    assert _identity(_file(Image.fromarray(values))) != _identity(_file(Image.fromarray(values.reshape(100, 30, 3))))
    first, second = _palette([RED] + [BLACK] * 255), _palette([LIME] + [BLACK] * 255)
    assert first.tobytes() == second.tobytes()
    assert _identity(_file(first)) != _identity(_file(second))


def test_identity_is_that_of_what_is_seen() -> None:
    """One picture in several encodings is one picture; the model, its options and the tenant set it apart."""
    picture = _palette([LIME] + [BLACK] * 255)
    files = [_file(picture), _file(picture.convert("RGB")), _file(picture.convert("RGBA")), _file(picture, "BMP")]
    assert len({_identity(encoded) for encoded in files}) == 1
    variants = [
        OPTIONS,
        replace(OPTIONS, model_revision="other"),
        replace(OPTIONS, tenant_salt=b"tenant"),
        replace(OPTIONS, image=replace(IMAGE, max_pixels=100_352)),
    ]
    assert len({_identity(files[0], options) for options in variants}) == len(variants)


def test_identity_does_not_depend_on_the_size_of_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = _file(_noise(50, 33))
    whole = _identity(encoded)
    monkeypatch.setattr("triptych.services.preprocess.decode.STRIP_BYTES", 150 * 4)
    assert _identity(encoded) == whole


# --- refusals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_missing", [128, 2000, 20_000])
def test_truncated_files_are_refused(format: str, num_missing: int) -> None:
    refused = _refusal(_file(_noise(200, 200), format)[:-num_missing])
    assert (refused.code, refused.message) == ("invalid_image", BROKEN_TEXT)


NO_PICTURE = {
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='8' height='8'/>",
    "html": b"<!doctype html><html></html>",
    "pdf": b"%PDF-1.7\n",
    "text": b"hello",
    "zeros": bytes(1000),
    **{
        format: _file(Image.new("RGB", (16, 16)), format) for format in ("TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "PCX", "TGA")
    },
}


@pytest.mark.parametrize("name", NO_PICTURE)
def test_other_formats_are_refused(name: str) -> None:
    refused = _refusal(NO_PICTURE[name])
    assert (refused.code, refused.message) == ("invalid_image", UNKNOWN_TEXT)


def test_empty_is_refused() -> None:
    assert (_refusal(b"").code, _refusal(b"").message) == ("invalid_image", EMPTY_TEXT)


@pytest.mark.parametrize("size", [(1093, 5), (5, 1093), (201, 1)])
def test_too_thin_is_refused(size: tuple[int, int]) -> None:
    refused = _refusal(_file(Image.new("RGB", size)))
    assert refused.code == "invalid_image"
    assert "200" in refused.message


@pytest.mark.parametrize("side", [12_000, 20_000])
def test_bombs_are_refused_by_their_header(side: int) -> None:
    assert _refusal(png((side, side), 1, GREY, [])).code == "image_too_large"


@pytest.mark.parametrize("format", FORMATS)
def test_pixel_bound_holds_for_every_format_and_exactly(format: str) -> None:
    encoded = _file(Image.new("RGB", (100, 50)), format)
    assert _decode(encoded, replace(OPTIONS, max_image_pixels=5000)).info.num_tokens
    assert _refusal(encoded, replace(OPTIONS, max_image_pixels=4999)).code == "image_too_large"


def test_frame_over_the_screen_of_a_gif_counts() -> None:
    """The header says 1x1, the frame inside is 300x300."""
    encoded = bytearray(_file(Image.new("P", (300, 300)), "GIF"))
    encoded[6:10] = b"\1\0\1\0"
    assert _refusal(bytes(encoded), replace(OPTIONS, max_image_pixels=1000)).code == "image_too_large"


def test_run_length_bitmaps_are_refused() -> None:
    encoded = bytearray(_file(Image.new("L", (8, 8)), "BMP"))
    encoded[30:34] = (1).to_bytes(4, "little")
    assert _refusal(bytes(encoded)).code == "invalid_image"


@given(
    format=st.sampled_from(FORMATS),
    edits=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=12),
    num_missing=st.integers(0, 100),
)
def test_damaged_files_are_decoded_or_refused(format: str, edits: list[tuple[int, int]], num_missing: int) -> None:
    """Whatever bytes come, the only exception is ours."""
    encoded = bytearray(DAMAGED_FROM[format])
    for position, value in edits:
        encoded[position % len(encoded)] = value
    del encoded[len(encoded) - num_missing :]
    refused: BadRequest | None = None
    try:
        decoded = _decode(bytes(encoded), replace(OPTIONS, max_image_pixels=250_000))
    except BadRequest as error:
        refused = error
    if refused is None:
        assert decoded.pixels.shape == (decoded.info.height, decoded.info.width, 3)
    else:
        assert refused.code in {"invalid_image", "image_too_large"}
        assert refused.param == PARAM


DAMAGED_FROM = {format: _file(_noise(24, 17), format) for format in FORMATS}
