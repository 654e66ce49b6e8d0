"""How each model family cuts a picture: from pixels to patches of the vision tower and tokens of the language model.

Rules of transformers' image processors, sizes only; tests hold them to the published counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from triptych.shared.checkpoint import ImageOptions, grid_thw, num_image_tokens, resized


@dataclass(frozen=True, slots=True)
class ImageShape:
    """A picture as the model sees it. num_tokens: vision tokens that the language model sees. num_pieces: parts that don't
    attend to each other in the vision tower, so that they can be encoded apart, of patches_per_piece patches each."""

    num_tokens: int
    num_pieces: int
    patches_per_piece: int

    @property
    def num_patches(self) -> int:
        return self.num_pieces * self.patches_per_piece

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs of full attention inside the pieces."""
        return self.num_pieces * self.patches_per_piece**2


class ImageRule(Protocol):
    """A family's way to cut pictures."""

    def shape(self, width: int, height: int) -> ImageShape:
        """What becomes of a picture of width x height pixels, both at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class NativeResolution:
    """Qwen2.5-VL: the whole picture at about its own size, merge_size ** 2 patches to a token."""

    options: ImageOptions

    def shape(self, width: int, height: int) -> ImageShape:
        grid = grid_thw(*resized(height, width, self.options), self.options)
        return ImageShape(num_image_tokens(grid, self.options), 1, math.prod(grid))


@dataclass(frozen=True, slots=True)
class TilesAndThumbnail:
    """InternVL: the grid of at most max_tiles square tiles whose ratio is nearest the picture's, and, when that is more
    than one tile, a thumbnail; each is encoded alone (`dynamic_preprocess` of its model card)."""

    tile_side: int
    max_tiles: int
    patches_per_tile: int
    tokens_per_tile: int

    def shape(self, width: int, height: int) -> ImageShape:
        num_tiles = self._num_tiles(width, height)
        num_pieces = num_tiles + (num_tiles > 1)
        return ImageShape(num_pieces * self.tokens_per_tile, num_pieces, self.patches_per_tile)

    def _num_tiles(self, width: int, height: int) -> int:
        """Of equally near ratios the larger grid, if the picture has at least half as many pixels as it."""
        best, best_distance = 1, math.inf
        for num_tiles, w, h in _grids(self.max_tiles):
            distance = abs(width / height - w / h)
            is_filled = width * height > 0.5 * num_tiles * self.tile_side**2
            if distance < best_distance or (distance == best_distance and is_filled):
                best, best_distance = num_tiles, distance
        return best


@dataclass(frozen=True, slots=True)
class TiledCanvas:
    """Llama-3.2-Vision: the canvas of at most max_tiles tiles that the picture fits with least enlargement, or else with
    least reduction. The tower always computes max_tiles, padded, which attend to each other; only those in use give tokens
    (`get_optimal_tiled_canvas` in transformers' image_processing_mllama)."""

    tile_side: int
    max_tiles: int
    tokens_per_tile: int

    def shape(self, width: int, height: int) -> ImageShape:
        return ImageShape(self._num_tiles(width, height) * self.tokens_per_tile, 1, self.max_tiles * self.tokens_per_tile)

    def _num_tiles(self, width: int, height: int) -> int:
        scales = [(self.tile_side * min(w / width, h / height), num_tiles) for num_tiles, w, h in _grids(self.max_tiles)]
        scale = min((scale for scale, _ in scales if scale >= 1), default=max(scales)[0])
        return min(num_tiles for its, num_tiles in scales if its == scale)


def _grids(max_tiles: int) -> list[tuple[int, int, int]]:
    """Tiles, columns and rows, fewest tiles first."""
    sides = range(1, max_tiles + 1)
    return sorted((w * h, w, h) for w in sides for h in sides if w * h <= max_tiles)
