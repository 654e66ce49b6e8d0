"""Encoded pictures to time preprocess with: as hard to decode as a photograph, which random pixels and flat areas are not."""

from __future__ import annotations

import io

from PIL import Image

QUALITY = 90  # chosen: what cameras and phones save at
GRAIN_SIGMA = 40  # chosen: with the blur below 0.4 bytes per pixel, as detailed photographs have
BLUR = 4  # pixels that share their grain


def photograph(width: int, height: int) -> bytes:
    """A JPEG of smooth grain in three channels; not the same one each time."""
    small = (max(1, width // BLUR), max(1, height // BLUR))
    channels = [Image.effect_noise(small, GRAIN_SIGMA).resize((width, height), Image.Resampling.BICUBIC) for _ in range(3)]
    out = io.BytesIO()
    Image.merge("RGB", channels).save(out, "JPEG", quality=QUALITY)
    return out.getvalue()
