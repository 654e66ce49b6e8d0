"""Encoded picture -> canonical RGB -> identity and resized pixels. One function for every way in; no I/O, no loop.

Canonical: first frame, EXIF orientation applied, alpha on white, 8 bits per channel. Pillow's own error texts never leave
this module: they can hold addresses. Called by decode_pool.py in its workers.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from triptych.cache.keys import mm_hash
from triptych.services.preprocess.jpeg_scans import has_too_many_scans
from triptych.shared.checkpoint import ImageOptions, grid_thw, num_image_tokens, resized
from triptych.shared.errors import BadRequest
from triptych.shared.messages import ImageInfo

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # no JPEG2000, TIFF, PSD, EPS, ...: each parser is attack surface
HASH_PART_BYTES = 1 << 20  # chosen: hash strips of about 1 MB, so that a 64 Mpx picture is not copied whole
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


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """pixels: uint8 [height, width, 3] after the model's resize, contiguous and writable."""

    info: ImageInfo
    pixels: npt.NDArray[np.uint8]


def decode_image(encoded: bytes | bytearray, options: DecodeOptions, param: str) -> DecodedImage:
    """Decode, identify and resize one picture as the model's own image processor would.

    Raises:
        BadRequest: invalid_image (not decodable, or too thin) or image_too_large; `param` names the item.
    """
    canonical = canonical_rgb(encoded, options, param)
    height, width = resized(canonical.height, canonical.width, options.image)
    grid = grid_thw(height, width, options.image)
    digest = mm_hash(
        _strips(canonical),
        (canonical.height, canonical.width),
        model_revision=options.model_revision,
        options_key=options.image.key(),
        tenant_salt=options.tenant_salt,
    )
    info = ImageInfo(digest, height, width, grid, num_image_tokens(grid, options.image))
    return DecodedImage(info, np.array(canonical.resize((width, height), Image.Resampling.BICUBIC)))


def canonical_rgb(encoded: bytes | bytearray, options: DecodeOptions, param: str) -> Image.Image:
    """The picture as a viewer shows it on white, mode RGB. Size and ratio are checked before the pixels are decoded."""
    if not encoded:
        raise BadRequest(EMPTY_TEXT, code="invalid_image", param=param)
    with _open(encoded, param) as image:
        _check_size(image.width, image.height, options, param)
        try:
            image.load()
            return _to_rgb(_upright(image))
        except MemoryError:
            raise
        except Exception as error:  # parsers raise whatever a broken file makes them; each is the file's fault
            raise BadRequest(BROKEN_TEXT, code="invalid_image", param=param) from error


def _open(encoded: bytes | bytearray, param: str) -> Image.Image:
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


def _upright(image: Image.Image) -> Image.Image:
    """EXIF orientation applied. Not ImageOps.exif_transpose: that also rewrites the EXIF block, and fails on odd ones."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # a broken EXIF block does not keep viewers from showing the picture
        return image
    method = _TRANSPOSE.get(orientation) if isinstance(orientation, int) else None
    return image if method is None else image.transpose(method)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _grey16_to_rgb(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _grey16_to_rgb(image: Image.Image) -> Image.Image:
    """The high byte. Pillow's own conversion clips at 255: all but the darkest 1/256 of a 16-bit picture turns white."""
    values = np.asarray(image).astype(np.int64)
    grey = (values.clip(0, 0xFFFF) >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def _strips(image: Image.Image) -> Iterator[bytes]:
    num_rows = max(1, HASH_PART_BYTES // (image.width * 3))
    for top in range(0, image.height, num_rows):
        yield image.crop((0, top, image.width, min(image.height, top + num_rows))).tobytes()
