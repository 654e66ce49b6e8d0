"""The bound of bench overlap, by hand and against what must always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.loadgen.bench.pipeline import Pipeline
from triptych.shared.cost_model.api import PrefillChunk
from triptych.shared.cost_model.forms import PassCosts
from triptych.shared.cost_model.images import ImageShape
from triptych.shared.cost_model.published import published_cost_model

COST = published_cost_model("a100", "internvl2.5-26b", 1)
# a patch takes a second to encode, a token half of one to compute, and nothing else takes time
SIMPLE = replace(COST, encode=PassCosts(0.0, 1.0), prefill=PassCosts(0.0, 0.5))
IMAGE = ImageShape(num_tokens=1, num_pieces=1, patches_per_piece=1)


def test_eight_images_by_two_encoders() -> None:
    pipeline = Pipeline(SIMPLE, SIMPLE, 2)
    landed_s = pipeline.landings_s([IMAGE] * 8, [0.0] * 8)
    assert landed_s == [1, 1, 2, 2, 3, 3, 4, 4]
    assert pipeline.first_token_s([IMAGE] * 8, landed_s, 2) == 4 + 1 + 1
    assert pipeline.prefill_to_encode([IMAGE] * 8) == 0.5


def test_pieces_are_divided_among_the_encoders() -> None:
    pipeline = Pipeline(SIMPLE, SIMPLE, 2)
    images = [replace(IMAGE, num_tokens=3, num_pieces=3)] * 2
    landed_s = pipeline.landings_s(images, [0.0, 0.0])
    assert landed_s == [1, 1, 2, 2, 3, 3]
    assert pipeline.first_token_s(images, landed_s, 0) == 1 + 6 / 2, "the prompt goes on with each"


def test_pixels_that_come_late_and_images_that_overtake() -> None:
    pipeline = Pipeline(SIMPLE, SIMPLE, 2)
    large = replace(IMAGE, patches_per_piece=5)
    assert pipeline.landings_s([large, IMAGE, IMAGE], [0.0, 3.0, 3.0]) == [5, 4, 5]
    assert pipeline.first_token_s([large, IMAGE, IMAGE], [5, 4, 5], 0) == 5 + 1.5, "all have landed when the first has"


sizes = st.lists(st.tuples(st.integers(100, 2000), st.integers(100, 2000)), min_size=1, max_size=8)


@given(sizes, st.integers(1, 3))
def test_a_bound_is_between_the_longest_stage_and_the_barrier(pixels: list[tuple[int, int]], num_encoders: int) -> None:
    pipeline = Pipeline(COST, COST, num_encoders)
    images = [COST.image(*size) for size in pixels]
    landed_s = pipeline.landings_s(images, [COST.preprocess_s(*size) for size in pixels])
    first_token_s = pipeline.first_token_s(images, landed_s, 20)
    compute_s = COST.prefill_s([PrefillChunk(20 + sum(image.num_tokens for image in images))])
    assert first_token_s >= max(*landed_s, compute_s)
    overheads_s = len(landed_s) * COST.prefill_s([PrefillChunk(1)])  # each piece reads the weights
    assert first_token_s <= max(landed_s) + compute_s + overheads_s + 1e-9
    assert first_token_s == pytest.approx(max(landed_s) + compute_s) or len(landed_s) > 1
