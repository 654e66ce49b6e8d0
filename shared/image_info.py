"""What the control plane knows of a picture, and how large its client wants it seen: parts of messages (see messages.py)."""

from __future__ import annotations

import msgspec

PartKey = tuple[bytes, int | None, int]  # mm_hash, first_piece, num_pieces


class ImageInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the control plane knows of one image: height and width after the model's resize (pixels), patch grid
    (t, h, w), and the number of vision tokens that it takes in the prompt.

    num_pieces: tiles, of equally many tokens one after another, that the vision tower encodes each for itself (t counts them
    where there are several). first_piece: None for a whole image; a part of one is an ImageInfo, too, with its own num_pieces,
    num_tokens and t, and with mm_hash and size of the whole."""

    mm_hash: bytes
    height: int
    width: int
    grid_thw: tuple[int, int, int]
    num_tokens: int
    num_pieces: int = 1
    first_piece: int | None = None

    @property
    def key(self) -> PartKey:
        """Equal where embeddings are."""
        return self.mm_hash, self.first_piece, self.num_pieces

    def part(self, first: int, num: int) -> ImageInfo:
        """num of the pieces of a whole image, from number `first` on. All of them are the image."""
        if num == self.num_pieces:
            return self
        grid_thw = (num, *self.grid_thw[1:])
        num_tokens = self.num_tokens // self.num_pieces * num
        return msgspec.structs.replace(self, grid_thw=grid_thw, num_tokens=num_tokens, num_pieces=num, first_piece=first)


class PixelLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many pixels of a picture its client wants the model to see, at least and at most; None: the server's own bound."""

    min_pixels: int | None = None
    max_pixels: int | None = None


NO_LIMITS = PixelLimits()
