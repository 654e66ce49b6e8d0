"""PngTemplate: every variant is a whole PNG file of the same picture, and no two are the same."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from triptych.loadgen.replay.png import MAX_SERIAL, PngTemplate


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def decoded(template: PngTemplate, serial: int) -> np.ndarray:
    data = base64.b64decode(b"".join(template.variant(serial)), validate=True)
    with Image.open(io.BytesIO(data)) as image:
        image.verify()  # checksums of the chunks
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


@pytest.mark.parametrize(("width", "height"), [(8, 1), (9, 2), (64, 64), (65, 33), (66, 7), (500, 3), (4096, 2)])
def test_a_variant_is_the_picture_but_for_its_mark(width: int, height: int) -> None:
    image = picture(width, height)
    template = PngTemplate(image)
    original = np.asarray(image)
    assert (decoded(template, 0) == original).all()
    for serial in (1, 12_345_678_901, MAX_SERIAL):
        changed = decoded(template, serial).astype(int) - original
        assert changed.any()
        assert np.abs(changed).max() <= 3
        assert not changed[1:].any()
        assert not changed[0, 8:].any()


def test_each_serial_has_its_own_pixels() -> None:
    template = PngTemplate(Image.new("RGB", (20, 20), "white"))
    serials = [0, 1, 2, 3, 4, 1 << 24, 1 << 47, MAX_SERIAL]
    assert len({decoded(template, serial).tobytes() for serial in serials}) == len(serials)


def test_nearly_all_of_a_file_is_shared() -> None:
    template = PngTemplate(picture(200, 200))
    first, second = template.variant(1), template.variant(2)
    assert first[1] is second[1]
    assert len(first[1]) > 0.95 * sum(map(len, first))


def test_other_modes_become_rgb() -> None:
    assert decoded(PngTemplate(Image.new("L", (8, 8), 77)), 0).tolist() == [[[77] * 3] * 8] * 8
