"""What the control plane knows of a picture, and how large its client wants it seen: parts of messages (see messages.py)."""

from __future__ import annotations

import msgspec


class ImageInfo(msgspec.Struct, frozen=True):
    """What the control plane knows of one image: height and width after the model's resize (pixels), patch grid
    (t, h, w), and the number of vision tokens that it takes in the prompt."""

    mm_hash: bytes
    height: int
    width: int
    grid_thw: tuple[int, int, int]
    num_tokens: int


class PixelLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many pixels of a picture its client wants the model to see, at least and at most; None: the server's own bound."""

    min_pixels: int | None = None
    max_pixels: int | None = None


NO_LIMITS = PixelLimits()
