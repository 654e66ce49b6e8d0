"""An entry of the scaler's decision log: what the cluster looked like, what was decided and why, and what came of it. JSON of
the scaler's API, read by `triptych status --decisions`. Seconds, and rates, are of the policy's clock (modelled where
instances are emulated)."""

from __future__ import annotations

from typing import Literal

import msgspec

ActionName = Literal["switch", "launch", "drain", "advise"]
Result = Literal["pending", "done", "failed", "refused", "advised"]


class Look(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cluster at one moment, in short. instances: by kind and group, such as "decode multimodal"; those that start or
    switch count as what they will be. num_waiting, num_running: requests by stage. free_kv: share of all KV slots. By group
    of requests: requests_per_s and images_per_request of the last moments, and attainment, the share of requests within SLO,
    where any ended lately."""

    instances: dict[str, int]
    num_waiting: dict[str, int]
    num_running: dict[str, int]
    free_kv: float
    requests_per_s: dict[str, float] = {}
    images_per_request: float = 0.0
    attainment: dict[str, float] = {}


class Outcome(msgspec.Struct, frozen=True):
    """What the cluster looked like after_s later."""

    after_s: float
    look: Look


class DecisionEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """number: counted from the scaler's start. at: UTC, ISO 8601. target: an instance, or a kind; to: what becomes of it.
    terms: the figures that the policy decided by; null: infinite, which JSON has not. advised: nothing was done here, others
    are to follow the wanted replicas. detail: why it failed, or the names of what was launched. took_s: real seconds until the
    new roles served."""

    number: int
    at: str
    action: ActionName
    target: str
    to: str
    reason: str
    terms: dict[str, float | None]
    before: Look
    result: Result = "pending"
    detail: str = ""
    took_s: float = 0.0
    outcomes: tuple[Outcome, ...] = ()


class DecisionList(msgspec.Struct, frozen=True):
    """What the scaler's /v1/decisions answers: the latest decisions, oldest first. elastic: off, advise or on. num_decisions:
    since the scaler's start."""

    policy: str
    elastic: str
    num_decisions: int
    decisions: tuple[DecisionEntry, ...]
