"""Every odd encoding is the same picture as its plain equivalent, to the model and to the cache."""

from __future__ import annotations

import numpy as np
import pytest

from support.odd_pictures import ODD, file
from triptych.services.preprocess.decode import DecodeOptions, decode_image
from triptych.shared.checkpoint import ImageOptions

pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")  # as decode_worker does
OPTIONS = DecodeOptions(ImageOptions(14, 2, 2, 3136, 200704, (0.5,) * 3, (0.5,) * 3), "rev", 1_000_000)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_picture_is_its_plain_equivalent(name: str) -> None:
    encoded, plain = ODD[name]
    info, pixels = decode_image(encoded, OPTIONS, "p")
    plain_info, plain_pixels = decode_image(file(plain), OPTIONS, "p")
    assert np.array_equal(np.asarray(pixels), np.asarray(plain_pixels))
    assert info == plain_info


def test_the_plain_ones_differ() -> None:
    """Else the test above would say little."""
    hashes = {decode_image(file(plain), OPTIONS, "p")[0].mm_hash for _, plain in ODD.values()}
    assert len(hashes) > len(ODD) / 2
