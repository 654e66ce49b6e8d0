"""RequestOwners: whose requests are here, for how long."""

from __future__ import annotations

from triptych.shared.messages import InstanceId, RequestId
from triptych.shared.request_owners import RequestOwners

A, B = InstanceId("router-a"), InstanceId("router-b")


def test_requests_of_a_router_until_they_are_forgotten() -> None:
    owners = RequestOwners()
    for i in range(4):
        owners.note(RequestId(f"r{i}"), A if i % 2 else B, 10.0)
    owners.forget(RequestId("r1"))
    owners.forget(RequestId("never"))
    assert owners.of(A) == ["r3"]
    assert owners.of(B) == ["r0", "r2"]


def test_requests_that_nobody_released_are_forgotten() -> None:
    now_s = 0.0
    owners = RequestOwners(clock=lambda: now_s)
    owners.note(RequestId("old"), A, 10.0)
    owners.note(RequestId("renewed"), A, 10.0)
    now_s = 5.0
    owners.note(RequestId("renewed"), A, 10.0)
    now_s = 11.0
    owners.note(RequestId("new"), A, 10.0)
    assert owners.of(A) == ["renewed", "new"]
    assert len(owners) == 2
