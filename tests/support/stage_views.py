"""Instances as policies see them, made by hand or at random."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from triptych.shared.messages import InstanceId


@dataclass(frozen=True)
class View:
    """A `StageView` of the policies."""

    instance_id: InstanceId
    num_requests: int = 0
    num_pending_tokens: int = 0
    num_free_blocks: int = 100
    tokens_per_s: float = 0.0
    other_s: float = 0.0
    has_images: bool = False
    decodes: bool = False


def view(name: str, requests: int = 0, tokens: int = 0, blocks: int = 100, pace: float = 0.0, other_s: float = 0.0) -> View:
    """Of an instance that encodes nothing."""
    return View(InstanceId(name), requests, tokens, blocks, pace, other_s)


views = st.lists(
    st.builds(
        view,
        st.text("abc", min_size=1, max_size=3),
        st.integers(0, 9),
        st.integers(0, 9999),
        st.integers(0, 50),
        st.sampled_from([0.0, 200.0, 900.0, 1000.0, 5000.0]),
        st.sampled_from([0.0, 0.5, 2.0]),
    ),
    max_size=6,
    unique_by=lambda v: v.instance_id,
)
