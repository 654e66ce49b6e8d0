"""Sums over the outcomes of one small class. They add up: figures of larger classes are those of the sum."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Self

from triptych.loadgen.replay.outcome import CANCELLED, LEFT_OUT, UNFINISHED, RequestOutcome
from triptych.loadgen.replay.slo import Limits
from triptych.loadgen.report.histogram import Histogram
from triptych.loadgen.report.schema import Attainment, ClassFigures, Distribution

LEVELS = (50, 90, 95, 99)
NO_LIMITS = Limits()


@dataclass(slots=True)
class Span:
    """From the least to the largest time seen."""

    begin_s: float = math.inf
    end_s: float = -math.inf

    def __iadd__(self, other: Span) -> Span:
        self.begin_s = min(self.begin_s, other.begin_s)
        self.end_s = max(self.end_s, other.end_s)
        return self

    @property
    def length_s(self) -> float:
        return max(0.0, self.end_s - self.begin_s)


@dataclass(slots=True)
class Sums:
    """What has fields that can all be added."""

    def __iadd__(self, other: Self) -> Self:
        for name in (known.name for known in fields(self)):
            total = getattr(self, name)
            total += getattr(other, name)
            setattr(self, name, total)
        return self


@dataclass(slots=True)
class SloTally(Sums):
    """How many requests had a limit, and met it."""

    num_requests: int = 0
    num_met: int = 0
    num_met_ttft: int = 0
    num_met_tbt: int = 0

    def add(self, outcome: RequestOutcome, limits: Limits | None) -> None:
        """A failed request has met nothing; one without any limit doesn't count."""
        if limits is None or limits == NO_LIMITS:
            return
        is_whole = outcome.error is None and outcome.ttft_s is not None
        in_ttft = is_whole and _within(outcome.ttft_s, limits.ttft_s)
        in_tbt = is_whole and _within(outcome.mean_tbt_s, limits.tbt_s)
        self.num_requests += 1
        self.num_met_ttft += in_ttft
        self.num_met_tbt += in_tbt
        self.num_met += in_ttft and in_tbt

    def figures(self, span_s: float) -> Attainment | None:
        """None: no request had a limit."""
        if not self.num_requests:
            return None
        return Attainment(
            num_requests=self.num_requests,
            met=self.num_met / self.num_requests,
            met_ttft=self.num_met_ttft / self.num_requests,
            met_tbt=self.num_met_tbt / self.num_requests,
            goodput_per_s=self.num_met / span_s if span_s else 0.0,
        )


@dataclass(slots=True)
class Tally(Sums):
    """Counts, times and latencies of requests. Latencies are those of finished ones. num_short: answers shorter than forced;
    num_empty: without any text."""

    num_finished: int = 0
    num_cancelled: int = 0
    num_unfinished: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_chunks: int = 0
    num_without_usage: int = 0
    num_short: int = 0
    num_empty: int = 0
    num_answers_known: int = 0
    num_answers_right: int = 0
    arrivals: Span = field(default_factory=Span)
    run: Span = field(default_factory=Span)
    class_wide: SloTally = field(default_factory=SloTally)
    own_scaled: SloTally = field(default_factory=SloTally)
    send_lag_s: Histogram = field(default_factory=Histogram)
    ttft_s: Histogram = field(default_factory=Histogram)
    tbt_over_tokens_s: Histogram = field(default_factory=Histogram)
    tbt_request_mean_s: Histogram = field(default_factory=Histogram)
    e2e_s: Histogram = field(default_factory=Histogram)
    input_s_per_token: Histogram = field(default_factory=Histogram)
    output_s_per_token: Histogram = field(default_factory=Histogram)

    def add(self, outcome: RequestOutcome, class_wide: Limits | None, own_scaled: Limits | None) -> None:
        """Take in one outcome. class_wide, own_scaled: the limits that it was to meet."""
        if outcome.error in LEFT_OUT:
            self.num_cancelled += outcome.error == CANCELLED
            self.num_unfinished += outcome.error == UNFINISHED
            return
        self.send_lag_s.add(outcome.send_lag_s)
        self.arrivals += Span(outcome.scheduled_s, outcome.scheduled_s)
        self.run += Span(outcome.scheduled_s, outcome.end_s)
        self.class_wide.add(outcome, class_wide)
        self.own_scaled.add(outcome, own_scaled)
        if outcome.error is not None:
            self.errors[outcome.error] += 1
            return
        self.num_finished += 1
        self._add_tokens(outcome)
        self._add_latencies(outcome)
        if outcome.is_right is not None:
            self.num_answers_known += 1
            self.num_answers_right += outcome.is_right

    def _add_tokens(self, outcome: RequestOutcome) -> None:
        self.num_prompt_tokens += outcome.num_prompt_tokens
        self.num_cached_tokens += outcome.num_cached_tokens
        self.num_output_tokens += outcome.num_output_tokens
        self.num_short += 0 < outcome.num_output_tokens < outcome.num_forced_tokens
        self.num_empty += outcome.first_token_s is None
        if not outcome.num_prompt_tokens:
            self.num_without_usage += 1
        elif outcome.first_token_s is not None:
            self.num_chunks += len(outcome.token_gaps_s) + 1

    def _add_latencies(self, outcome: RequestOutcome) -> None:
        ttft_s, e2e_s, tbt_s = outcome.ttft_s, outcome.e2e_s, outcome.mean_tbt_s
        if ttft_s is None or e2e_s is None:
            return
        self.ttft_s.add(ttft_s)
        self.e2e_s.add(e2e_s)
        self.tbt_over_tokens_s.add_all(outcome.token_gaps_s)
        if tbt_s is not None:
            self.tbt_request_mean_s.add(tbt_s)
        if outcome.num_prompt_tokens:
            self.input_s_per_token.add(ttft_s / outcome.num_prompt_tokens)
        if outcome.num_output_tokens:
            self.output_s_per_token.add((e2e_s - ttft_s) / outcome.num_output_tokens)

    @property
    def num_requests(self) -> int:
        return self.num_finished + self.errors.total()

    def figures(self, name: str, span_s: float, arrivals_s: float) -> ClassFigures:
        """span_s, arrivals_s: of the whole run, so that the rates of classes add up."""
        return ClassFigures(
            name=name,
            num_requests=self.num_requests,
            num_finished=self.num_finished,
            num_cancelled=self.num_cancelled,
            num_unfinished=self.num_unfinished,
            errors=dict(self.errors.most_common()),
            offered_per_s=_ratio(self.num_requests, arrivals_s),
            finished_per_s=_ratio(self.num_finished, span_s),
            prompt_tokens_per_s=_ratio(self.num_prompt_tokens, span_s),
            output_tokens_per_s=_ratio(self.num_output_tokens, span_s),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            tokens_per_chunk=_ratio(self.num_output_tokens, self.num_chunks),
            cache_use=_ratio(self.num_cached_tokens, self.num_prompt_tokens),
            num_answers_known=self.num_answers_known,
            num_answers_right=self.num_answers_right,
            ttft_s=distribution(self.ttft_s),
            tbt_over_tokens_s=distribution(self.tbt_over_tokens_s),
            tbt_request_mean_s=distribution(self.tbt_request_mean_s),
            e2e_s=distribution(self.e2e_s),
            input_s_per_token=distribution(self.input_s_per_token),
            output_s_per_token=distribution(self.output_s_per_token),
            slo_class_wide=self.class_wide.figures(span_s),
            slo_own_scaled=self.own_scaled.figures(span_s),
        )


def distribution(histogram: Histogram) -> Distribution | None:
    """None: there is nothing in it."""
    if not histogram.count:
        return None
    p50, p90, p95, p99 = histogram.percentiles(LEVELS)
    return Distribution(count=histogram.count, mean=histogram.mean, p50=p50, p90=p90, p95=p95, p99=p99, max=histogram.largest)


def _within(value: float | None, limit: float | None) -> bool:
    return value is None or limit is None or value <= limit


def _ratio(value: float, to: float) -> float | None:
    return value / to if to else None
