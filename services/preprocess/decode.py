"""Encoded picture -> canonical RGB -> identity and resized pixels. One function for every way in; no I/O, no loop.

Canonical: first frame, EXIF orientation applied, alpha on white, 8 bits per channel. Pillow's own error texts never leave
this module: they can hold addresses. Called by decode_worker.py, whose memory is why this is numpy-free.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from triptych.cache.keys import NUM_CHANNELS, mm_hash
from triptych.services.preprocess.jpeg_scans import has_too_many_scans
from triptych.shared.checkpoint import ImageOptions, image_info, resized
from triptych.shared.errors import BadRequest
from triptych.shared.image_info import ImageInfo

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # no JPEG2000, TIFF, PSD, EPS, ...: each parser is attack surface
STRIP_BYTES = 4 << 20  # chosen: pictures are converted and hashed in strips, so that one of 64 Mpx is not copied whole
PNG_BIT_DEPTH_AT = 24  # signature, chunk head, width and height come before it (PNG specification, 11.2.2)
EMPTY_TEXT = "the image is empty"
UNKNOWN_TEXT = "the image has no known format: send a JPEG, PNG, WebP, GIF or BMP file"
TOO_LARGE_TEXT = "the image has too many pixels: send a smaller one"
SCANS_TEXT = "the image is a JPEG of too many scans: save it again as an ordinary one"
BROKEN_TEXT = "the image cannot be decoded: the file is truncated or broken"

_TRANSPOSE = {  # EXIF orientation -> what makes it upright (EXIF 2.3, 4.6.4)
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What decoding depends on besides the bytes. max_image_pixels bounds the picture before the model's resize."""

    image: ImageOptions
    model_revision: str
    max_image_pixels: int
    tenant_salt: bytes = b""


def decode_image(encoded: bytes, options: DecodeOptions, param: str) -> tuple[ImageInfo, Image.Image]:
    """Decode, identify and resize one picture as the model's own image processor would; it comes back in mode RGB.

    Raises:
        BadRequest: invalid_image (not decodable, or too thin) or image_too_large; `param` names the item.
    """
    canonical = canonical_rgb(encoded, options, param)
    height, width = resized(canonical.height, canonical.width, options.image)
    digest = mm_hash(
        strips(canonical),
        (canonical.height, canonical.width),
        model_revision=options.model_revision,
        options_key=options.image.key(),
        tenant_salt=options.tenant_salt,
    )
    info = image_info(height, width, options.image, digest)
    return info, canonical.resize((width, height), Image.Resampling.BICUBIC)


def strips(image: Image.Image) -> Iterator[bytes]:
    """The bytes of a picture in mode RGB, some rows at a time."""
    for box in _strip_boxes(image):
        yield (image if box == (0, 0, *image.size) else image.crop(box)).tobytes()


def canonical_rgb(encoded: bytes, options: DecodeOptions, param: str) -> Image.Image:
    """The picture as a viewer shows it on white, mode RGB. Size and ratio are checked before the pixels are decoded."""
    if not encoded:
        raise BadRequest(EMPTY_TEXT, code="invalid_image", param=param)
    with _open(encoded, param) as image:
        _check_size(image.width, image.height, options, param)
        try:
            frame = image.tile[0].extents if image.format == "GIF" and image.tile else None
            image.load()
            return _upright(_framed(_to_rgb(image, encoded), frame), image)
        except MemoryError:
            raise
        except Exception as error:  # parsers raise whatever a broken file makes them; each is the file's fault
            raise BadRequest(BROKEN_TEXT, code="invalid_image", param=param) from error


def picture_size(encoded: bytes, options: DecodeOptions, param: str) -> tuple[int, int]:
    """Width and height of a picture as its header tells them. Raises as decode_image, but for what is wrong with the pixels."""
    if not encoded:
        raise BadRequest(EMPTY_TEXT, code="invalid_image", param=param)
    with _open(encoded, param) as image:
        _check_size(image.width, image.height, options, param)
        return image.width, image.height


def _open(encoded: bytes, param: str) -> ImageFile.ImageFile:
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadRequest(UNKNOWN_TEXT, code="invalid_image", param=param) from None
    except Image.DecompressionBombError:  # where a parser needs memory already to open
        raise BadRequest(TOO_LARGE_TEXT, code="image_too_large", param=param) from None
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise BadRequest(BROKEN_TEXT, code="invalid_image", param=param) from error
    if image.format == "BMP" and image.info.get("compression") in (1, 2):
        # run-length BMPs are decoded by a Python loop that keeps the interpreter lock for seconds; nobody sends them
        image.close()
        raise BadRequest(UNKNOWN_TEXT, code="invalid_image", param=param)
    if image.format in ("JPEG", "MPO") and has_too_many_scans(encoded):
        image.close()
        raise BadRequest(SCANS_TEXT, code="invalid_image", param=param)
    return image


def _check_size(width: int, height: int, options: DecodeOptions, param: str) -> None:
    if width < 1 or height < 1:
        raise BadRequest(BROKEN_TEXT, code="invalid_image", param=param)
    if width * height > options.max_image_pixels:
        most = f"{width} x {height} is over {options.max_image_pixels / 1e6:g} million"
        raise BadRequest(f"{TOO_LARGE_TEXT} ({most})", code="image_too_large", param=param)
    try:
        resized(height, width, options.image)
    except BadRequest as error:
        raise BadRequest(error.message, code=error.code, param=param) from None


def _to_rgb(image: Image.Image, encoded: bytes) -> Image.Image:
    if image.format == "PNG":
        _scale_transparency(image, bit_depth=encoded[PNG_BIT_DEPTH_AT])
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    rgb = Image.new("RGB", image.size)
    for box in _strip_boxes(image):
        rgb.paste(_strip_to_rgb(image.crop(box)), box[:2])
    return rgb


def _scale_transparency(image: Image.Image, bit_depth: int) -> None:
    """A PNG's transparent grey or colour is told in the file's own depth, and Pillow leaves it so beside scaled pixels."""
    key = image.info.get("transparency")
    if image.mode == "L" and isinstance(key, int):
        image.info["transparency"] = key * 0xFF // ((1 << bit_depth) - 1)
    elif image.mode == "RGB" and bit_depth == 16 and isinstance(key, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in key)


def _strip_to_rgb(strip: Image.Image) -> Image.Image:
    if strip.mode.startswith("I"):
        return _grey16_to_rgb(strip)
    if strip.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in strip.info:
        rgba = strip.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return strip.convert("RGB")


def _grey16_to_rgb(strip: Image.Image) -> Image.Image:
    """The high byte. Pillow's own conversion clips at 255: all but the darkest 1/256 of a 16-bit picture turns white."""
    return strip.convert("I").point(_high_bytes(strip.info.get("transparency")), "L").convert("RGB")


@lru_cache(maxsize=1)  # for the strips of one picture
def _high_bytes(transparent: object) -> list[int]:
    return [0xFF if value == transparent else value >> 8 for value in range(1 << 16)]


def _framed(image: Image.Image, frame: tuple[int, int, int, int] | None) -> Image.Image:
    """A GIF's first frame may cover only a part of its screen; the rest shows what is behind the picture."""
    if frame in (None, (0, 0, *image.size)):
        return image
    framed = Image.new("RGB", image.size, "white")
    framed.paste(image.crop(frame), frame)
    return framed


def _upright(rgb: Image.Image, image: Image.Image) -> Image.Image:
    """The image's EXIF orientation applied. Not ImageOps.exif_transpose: it rewrites the EXIF block, and fails on odd ones."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # a broken EXIF block does not keep viewers from showing the picture
        return rgb
    method = _TRANSPOSE.get(orientation) if isinstance(orientation, int) else None
    return rgb if method is None else rgb.transpose(method)


def _strip_boxes(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    num_rows = max(1, STRIP_BYTES // (image.width * NUM_CHANNELS))
    for top in range(0, image.height, num_rows):
        yield 0, top, image.width, min(image.height, top + num_rows)
