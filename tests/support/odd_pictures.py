"""Pictures in odd encodings, each with the plain RGB picture that a viewer shows on white: the table of the picture tests."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageCms

WHITE, BLACK, RED, LIME, BLUE = (255, 255, 255), (0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)
GREY, COLOUR, PALETTE, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6  # PNG colour types
ORIENTATIONS = {  # what EXIF orientation does to a stored picture
    1: [],
    2: [Image.Transpose.FLIP_LEFT_RIGHT],
    3: [Image.Transpose.ROTATE_180],
    4: [Image.Transpose.FLIP_TOP_BOTTOM],
    5: [Image.Transpose.ROTATE_270, Image.Transpose.FLIP_LEFT_RIGHT],
    6: [Image.Transpose.ROTATE_270],
    7: [Image.Transpose.ROTATE_90, Image.Transpose.FLIP_LEFT_RIGHT],
    8: [Image.Transpose.ROTATE_90],
}


def file(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(size: tuple[int, int], depth: int, kind: int, rows: list[bytes], *extra: bytes) -> bytes:
    """By hand, for what Pillow does not write. extra: chunks before the pixels."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, depth, kind, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + pixels + png_chunk(b"IEND", b"")


def exif(orientation: int) -> bytes:
    made = Image.Exif()
    made[0x0112] = orientation
    return made.tobytes()


def rows(*pixels: tuple[int, int, int]) -> Image.Image:
    """A picture of one row."""
    image = Image.new("RGB", (len(pixels), 1))
    image.putdata(pixels)
    return image


def grey(*values: int) -> Image.Image:
    return rows(*((value, value, value) for value in values))


def on_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _palette(image: Image.Image) -> Image.Image:
    return image.convert("P", palette=Image.Palette.ADAPTIVE, colors=16)


def _alpha() -> Image.Image:
    """Every alpha over noise."""
    image = noise(32, 32).convert("RGBA")
    image.putalpha(Image.fromarray(np.arange(1024, dtype=np.uint32).astype(np.uint8).reshape(32, 32)))
    return image


def _depths() -> Iterator[tuple[str, bytes, Image.Image]]:
    key = [png_chunk(b"tRNS", b"\0\2")]
    yield "grey 1 bit", png((8, 1), 1, GREY, [b"\xaa"]), grey(*[255, 0] * 4)
    yield "grey 1 bit key", png((8, 1), 1, GREY, [b"\xaa"], png_chunk(b"tRNS", b"\0\0")), grey(*[255] * 8)
    yield "grey 2 bits", png((4, 1), 2, GREY, [b"\x1b"]), grey(0, 85, 170, 255)
    yield "grey 2 bits key", png((4, 1), 2, GREY, [b"\x1b"], *key), grey(0, 85, 255, 255)
    yield "grey 4 bits key", png((4, 1), 4, GREY, [b"\x12\x34"], *key), grey(17, 255, 51, 68)
    yield "grey 8 bits key", png((2, 1), 8, GREY, [b"\x02\x03"], *key), grey(255, 3)
    high = png_chunk(b"tRNS", b"\x12\x34")
    yield "grey 16 bits key", png((2, 1), 16, GREY, [b"\x12\x34\x12\x35"], high), grey(255, 0x12)
    yield "grey alpha 16 bits", png((2, 1), 16, GREY_ALPHA, [b"\x12\x34\xff\xff\x12\x34\0\0"]), grey(0x12, 255)
    yield "rgb 16 bits", png((1, 1), 16, COLOUR, [b"\x12\x99\x34\x99\x56\x99"]), rows((0x12, 0x34, 0x56))
    key = [png_chunk(b"tRNS", b"\x12\x99\x34\x99\x56\x99")]
    yield "rgb 16 bits key", png((2, 1), 16, COLOUR, [b"\x12\x99\x34\x99\x56\x99\1\1\2\2\3\3"], *key), rows(WHITE, (1, 2, 3))
    yield "rgba 16 bits", png((1, 1), 16, COLOUR_ALPHA, [b"\1\1\2\2\3\3\xff\xff"]), rows((1, 2, 3))
    palette = [png_chunk(b"PLTE", bytes(RED + LIME + BLUE)), png_chunk(b"tRNS", b"\xff\0")]
    yield "palette 2 bits alphas", png((4, 1), 2, PALETTE, [b"\x18"], *palette), rows(RED, WHITE, BLUE, RED)
    ramp = np.tile(np.arange(0, 65536, 64, dtype=np.uint16), (6, 1))
    yield "grey 16 bits ramp", file(Image.fromarray(ramp)), Image.fromarray((ramp >> 8).astype(np.uint8)).convert("RGB")


def _modes() -> Iterator[tuple[str, bytes, Image.Image]]:
    picture = noise(40, 24)
    for mode in ("1", "L", "P", "LA"):
        image = _palette(picture) if mode == "P" else picture.convert(mode)
        yield f"mode {mode}", file(image), image.convert("RGB")
    alpha = _alpha()
    yield "rgba", file(alpha), on_white(alpha)
    yield "grey alpha", file(alpha.convert("LA")), on_white(alpha.convert("LA"))
    yield "webp alpha", file(alpha, "WEBP", lossless=True, exact=True), on_white(alpha)
    yield "bmp alpha", file(alpha, "BMP"), alpha.convert("RGB")  # its fourth byte is no alpha by the format's first version
    yield "webp", file(picture, "WEBP", lossless=True), picture
    yield "bmp", file(picture, "BMP"), picture
    yield "gif", file(_palette(picture), "GIF"), _palette(picture).convert("RGB")
    yield "rgb key", file(rows(RED, LIME), transparency=RED), rows(WHITE, LIME)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    yield "profile", file(picture, icc_profile=profile), picture
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    yield "cmyk jpeg", file(cmyk, "JPEG", quality=100), Image.new("RGB", (16, 16), RED)
    jpeg = file(cmyk, "JPEG", quality=100)
    yield (
        "cmyk jpeg without adobe's mark",
        jpeg.replace(b"\xff\xee\0\x0eAdobe", b"\xff\xee\0\x0eOther"),
        Image.new("RGB", (16, 16), RED),
    )


def _frames() -> Iterator[tuple[str, bytes, Image.Image]]:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, LIME, BLUE)]
    for format, more in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("MPO", {"quality": 100})):
        encoded = file(frames[0], format, save_all=True, append_images=frames[1:], **more)
        first = Image.open(io.BytesIO(file(frames[0], "JPEG", quality=100))).convert("RGB") if format == "MPO" else frames[0]
        yield f"animated {format}", encoded, first
    part = bytearray(file(Image.new("P", (4, 4), 0), "GIF"))
    plain = Image.open(io.BytesIO(part)).convert("RGB")
    part[6:10] = struct.pack("<HH", 8, 8)  # the screen is larger than its only frame
    around = Image.new("RGB", (8, 8), "white")
    around.paste(plain, (0, 0))
    yield "gif frame smaller than its screen", bytes(part), around


def _turned() -> Iterator[tuple[str, bytes, Image.Image]]:
    picture = noise(40, 24)
    for orientation, steps in ORIENTATIONS.items():
        for format, more in (("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 90})):
            encoded = file(picture, format, exif=exif(orientation), **more)
            upright = Image.open(io.BytesIO(encoded)).convert("RGB")
            for step in steps:
                upright = upright.transpose(step)
            yield f"{format} orientation {orientation}", encoded, upright
    alpha = _alpha()
    yield "rgba orientation 6", file(alpha, exif=exif(6)), on_white(alpha).transpose(Image.Transpose.ROTATE_270)


ODD = {name: (encoded, plain) for make in (_depths, _modes, _frames, _turned) for name, encoded, plain in make()}
"""Encoded file and what it shows, by name."""
