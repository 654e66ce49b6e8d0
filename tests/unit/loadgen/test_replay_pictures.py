"""PicturePool: sizes, popularity, and that no picture comes twice unless it is meant to."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from triptych.loadgen.replay.pictures import PictureOptions, PicturePool, parse_reuse, parse_size
from triptych.loadgen.world import generator


@pytest.fixture(scope="module")
def photos() -> PicturePool:
    return PicturePool(PictureOptions(), seed=3)


def test_sizes_are_like_photographs(photos: PicturePool) -> None:
    rng = generator(1)
    pictures = [photos.pick(rng) for _ in range(2000)]
    sides = [np.sqrt(picture.width * picture.height) for picture in pictures]
    assert 450 < np.median(sides) < 550
    assert 1000 < np.percentile(sides, 95) < 1400
    wide = np.mean([picture.width > picture.height for picture in pictures])
    assert 0.2 < wide < 0.8


def test_no_picture_comes_twice(photos: PicturePool) -> None:
    rng = generator(1)
    assert len({photos.pick(rng).png64 for _ in range(1000)}) == 1000


def test_simple_pictures_have_few_shapes(photos: PicturePool) -> None:
    rng = generator(1)
    counts = Counter(len(photos.pick(rng).scene.shapes) for _ in range(500))
    assert counts[3]
    assert {len(photos.pick(rng, is_simple=True).scene.shapes) for _ in range(200)} <= {1, 2}


def test_popularity_falls_as_zipf_says() -> None:
    pool = PicturePool(PictureOptions(size=(64, 64), zipf=1.0, num_popular=50), seed=0)
    rng = generator(5)
    counts = [count for _, count in Counter(pool.pick(rng).png64 for _ in range(20_000)).most_common()]
    assert len(counts) == 50
    expected = 20_000 / np.arange(1, 51) / (1 / np.arange(1, 51)).sum()
    assert np.allclose(counts[:5], expected[:5], rtol=0.1)


def test_a_fixed_size_and_the_extremes(photos: PicturePool) -> None:
    fixed = PicturePool(PictureOptions(size=(100, 70)), seed=0)
    assert {(picture.width, picture.height) for picture in fixed.extremes()} == {(100, 70)}
    small, large = photos.extremes()
    assert small.width * small.height < 300**2 < 1000**2 < large.width * large.height


def test_sizes_follow_the_traces_image_tokens(photos: PicturePool) -> None:
    rng = generator(1)
    for num_pixels in (200**2, 500**2, 1100**2):
        found = photos.pick(rng, num_pixels=num_pixels)
        assert 0.8 * num_pixels < found.width * found.height < 1.25 * num_pixels
    largest = photos.extremes()[1]
    found = photos.pick(rng, num_pixels=1e9)
    assert (found.width, found.height) == (largest.width, largest.height)
    anyhow = PicturePool(PictureOptions(size="photos"), seed=3)
    assert len({anyhow.pick(rng, num_pixels=250_000.0).width for _ in range(20)}) > 3


def test_the_same_seed_gives_the_same_pictures(photos: PicturePool) -> None:
    again, other = PicturePool(PictureOptions(), seed=3), PicturePool(PictureOptions(), seed=4)
    first = photos.pick(generator(9)).png64
    assert first == again.pick(generator(9)).png64
    assert first != other.pick(generator(9)).png64


def test_the_worlds_sizes_are_those_of_the_demo_model() -> None:
    pool = PicturePool(PictureOptions(size="world"), seed=0)
    rng = generator(2)
    sides = [side for picture in (pool.pick(rng) for _ in range(300)) for side in (picture.width, picture.height)]
    assert min(sides) >= 112
    assert max(sides) <= 448


@pytest.mark.parametrize("text", ["", "big", "10x10", "5000x100", "64x", "64*64"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="WIDTHxHEIGHT"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "zipf", "zipf:", "zipf:-1", "1.1"])
def test_popularities_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="zipf:"):
        parse_reuse(text)


def test_parsing() -> None:
    assert (parse_size("photos"), parse_size("640x480")) == ("photos", (640, 480))
    assert (parse_reuse("none"), parse_reuse("zipf:1.1")) == (None, 1.1)
