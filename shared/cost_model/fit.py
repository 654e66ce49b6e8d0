"""Finds the costs of a stage from measured passes: least relative error, no cost negative.

For a given knee the form of forms.py is linear in its costs, so the knee is searched and the rest solved. There are few
costs: each subset of them is solved freely, and the best one without a negative cost is the non-negative optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from triptych.shared.cost_model.forms import PassCosts, beyond_one
from triptych.shared.cost_model.profile import FitError, StageProfile, TimedPass

NUM_KNEES = 33  # chosen: steps of a quarter over the range below
KNEE_RANGE = (1.0, 4.0)  # chosen: from one token to four times the largest pass; a knee beyond is a fixed cost
HOLD_OUT = 4  # chosen: one point in four
MIN_POINTS = HOLD_OUT  # fewer leave none to hold out between the quickest and the slowest
EQUALLY_GOOD = 1e-12  # of a sum of squares of relative errors: rounding
_Matrix = npt.NDArray[np.float64]


def fit_stage(points: Sequence[TimedPass]) -> StageProfile:
    """Fits three quarters of the points and judges the fit on the others, which lie between them: every fourth in the order
    of their times, neither the quickest nor the slowest.

    Raises:
        ValueError: there are too few points to hold one out.
    """
    ordered = sorted(points, key=lambda point: point.seconds)
    held = set(range(HOLD_OUT // 2, len(ordered) - 1, HOLD_OUT))
    if len(ordered) < MIN_POINTS:
        raise ValueError(f"{len(points)} points are too few to judge a fit")
    marked = tuple(replace(point, is_held_out=i in held) for i, point in enumerate(ordered))
    costs = fit_pass([point for point in marked if not point.is_held_out])
    return StageProfile(costs, fit_error(costs, [point for point in marked if point.is_held_out]), marked)


def fit_pass(points: Sequence[TimedPass]) -> PassCosts:
    """The costs that explain the points best.

    Args:
        points: at least one, of more than no tokens and no time each. What they don't vary can't be told apart, and is
            counted as the cost that comes first in the form.
    """
    seconds = np.array([point.seconds for point in points])
    largest = max(point.work.num_tokens for point in points)
    knees = [0.0, *np.geomspace(KNEE_RANGE[0], KNEE_RANGE[1] * largest, NUM_KNEES)]
    fits = [(knee, *_solve(_terms(points, knee) / seconds[:, None])) for knee in knees]
    knee, costs, _ = min(fits, key=lambda fit: fit[2])
    fixed_s, token_s, sequence_s, pair_s, context_s, many_s = costs
    return PassCosts(fixed_s, token_s, float(knee), sequence_s, pair_s, context_s, many_s)


def fit_error(costs: PassCosts, points: Sequence[TimedPass]) -> FitError:
    """How well the costs predict points, at best others than they were fitted to."""
    errors = [abs(costs.pass_s(point.work) / point.seconds - 1) for point in points]
    return FitError(len(points), float(np.median(errors)), float(np.quantile(errors, 0.95)))


def _terms(points: Sequence[TimedPass], knee_tokens: float) -> _Matrix:
    """What each cost is multiplied with, a row for each point. Without a pass of one token, none says what many cost over it:
    the fixed cost has it."""
    has_one = any(point.work.num_tokens <= 1 for point in points)
    rows = [
        (
            1.0,
            np.hypot(knee_tokens, work.num_tokens),
            work.num_sequences,
            work.num_pairs,
            work.num_context_tokens,
            beyond_one(work.num_tokens) if has_one else 0.0,
        )
        for work in (point.work for point in points)
    ]
    return np.array(rows, dtype=np.float64)


def _solve(terms: _Matrix) -> tuple[tuple[float, ...], float]:
    """Costs >= 0 with least |terms @ costs - 1|, and that sum of squares. Fewer costs win over equally good more."""
    scale = np.maximum(np.abs(terms).max(axis=0), np.finfo(np.float64).tiny)
    scaled = terms / scale
    best, least = np.zeros(terms.shape[1]), float(len(terms))
    columns = [i for i in range(terms.shape[1]) if terms[:, i].any()]
    for num_columns in range(1, len(columns) + 1):
        for chosen in itertools.combinations(columns, num_columns):
            solved = np.linalg.lstsq(scaled[:, chosen], np.ones(len(terms)), rcond=None)[0]
            error = float(np.square(scaled[:, chosen] @ solved - 1).sum())
            if solved.min() >= 0 and error < least - EQUALLY_GOOD:
                best, least = np.zeros(terms.shape[1]), error
                best[list(chosen)] = solved
    return tuple(float(cost) for cost in best / scale), least
