"""Rates of what is asked for, from counts: average, recent, growing. Pure and frozen; for the scaler and simulators alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from triptych.shared.instance_info import Demand
from triptych.shared.policies.elastic.views import NO_RATES, GroupDemand, Rates
from triptych.shared.policies.groups import GROUPS, Group

NO_DEMAND = Demand()


@dataclass(frozen=True, slots=True)
class _Counts:
    """Sums of `Demand` over some seconds; floats, since older ones may count less."""

    seconds: float = 0.0
    requests: float = 0.0
    text_tokens: float = 0.0
    images: float = 0.0
    image_tokens: float = 0.0
    output_tokens: float = 0.0
    ended: float = 0.0
    in_time: float = 0.0

    def plus(self, other: _Counts, weight: float = 1.0) -> _Counts:
        """This, weighted, and other."""
        return _Counts(*(weight * getattr(self, name) + getattr(other, name) for name in _Counts.__slots__))

    def rates(self) -> Rates:
        if not self.seconds:
            return NO_RATES
        counts = (self.requests, self.text_tokens, self.images, self.image_tokens, self.output_tokens)
        return Rates(*(count / self.seconds for count in counts))


def _counts_of(demand: Demand, seconds: float) -> _Counts:
    return _Counts(
        seconds,
        demand.num_requests,
        demand.num_text_tokens,
        demand.num_images,
        demand.num_image_tokens,
        demand.num_output_tokens,
        demand.num_ended,
        demand.num_in_time,
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """past, lately: everything, decayed slowly, and soon. windows: whole ones, oldest first. now: what is after those."""

    past: _Counts = field(default_factory=_Counts)
    lately: _Counts = field(default_factory=_Counts)
    windows: tuple[_Counts, ...] = ()
    now: _Counts = field(default_factory=_Counts)


@dataclass(frozen=True, slots=True)
class DemandMeter:
    """last_s: when counts were added last, or from when on they count. average_s: after as long something counts 1 / e in the
    averages; these are of what was measured alone, so that the first moments are no seed that lingers. lately_s: the same of
    the other average, by which instances are started and ended. window_s: of recent
    rates, and of those that peaks, peak_s back, are taken from. attainment_s: of the requests that attainment is of."""

    last_s: float
    average_s: float = 120.0  # chosen: minutes, so that a surge of some seconds moves no roles
    lately_s: float = 30.0  # chosen: about what an instance takes to start
    window_s: float = 10.0  # chosen: some tens of requests, where roles are worth moving
    peak_s: float = 300.0  # chosen: ModServe's period
    attainment_s: float = 60.0  # chosen
    groups: Mapping[Group, _Group] = field(default_factory=lambda: dict.fromkeys(GROUPS, _Group()))

    def add(self, now_s: float, counts: Mapping[Group, Demand]) -> DemandMeter:
        """counts: of all routers since last_s; a group that is not there had none."""
        seconds = now_s - self.last_s
        if seconds <= 0:
            return self
        groups = {
            name: self._with(group, _counts_of(counts.get(name, NO_DEMAND), seconds)) for name, group in self.groups.items()
        }
        return replace(self, last_s=now_s, groups=groups)

    def demand(self) -> dict[Group, GroupDemand]:
        """By group, as of last_s."""
        return {name: self._demand(group) for name, group in self.groups.items()}

    def _with(self, group: _Group, counts: _Counts) -> _Group:
        past = group.past.plus(counts, math.exp(-counts.seconds / self.average_s))
        lately = group.lately.plus(counts, math.exp(-counts.seconds / self.lately_s))
        now = group.now.plus(counts)
        if now.seconds < self.window_s:
            return _Group(past, lately, group.windows, now)
        num_kept = max(1, math.ceil(max(self.peak_s, self.attainment_s) / self.window_s))
        return _Group(past, lately, (*group.windows, now)[-num_kept:], _Counts())

    def _demand(self, group: _Group) -> GroupDemand:
        last = group.now if not group.windows else group.windows[-1].plus(group.now)
        windows = (*group.windows[-math.ceil(self.peak_s / self.window_s) :], last)
        average, lately = group.past.rates(), group.lately.rates()
        growth = _rates(
            lambda name: max(0.0, getattr(lately, name) - getattr(average, name)) / (self.average_s - self.lately_s)
        )
        ended = functools.reduce(_Counts.plus, group.windows[-math.ceil(self.attainment_s / self.window_s) :], group.now)
        return GroupDemand(
            average=average,
            recent=last.rates(),
            peak_images_per_request=max(window.rates().images_per_request for window in windows),
            attainment=ended.in_time / ended.ended if ended.ended else None,
            num_ended=round(ended.ended),
            now=_rates(lambda name: getattr(lately, name) + self.lately_s * getattr(growth, name)),
            growth=growth,
        )


def _rates(of: Callable[[str], float]) -> Rates:
    return Rates(*map(of, Rates.__slots__))
