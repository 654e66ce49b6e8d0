"""Modality groups (ElasticMM, arXiv 2507.10069): instances for text requests, and for those with pictures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Group = str
"""Of an instance: whose requests it is for. Of a request: TEXT or MULTIMODAL."""

TEXT, MULTIMODAL, ANY = "text", "multimodal", ""
GROUPS = (TEXT, MULTIMODAL)


class Grouped(Protocol):
    """What belongs to a group, or to ANY."""

    @property
    def group(self) -> Group: ...


View = TypeVar("View", bound=Grouped)


def group_of_request(num_images: int) -> Group:
    """Pictures anywhere in the conversation count: its later turns stay where their KV is."""
    return MULTIMODAL if num_images else TEXT


def of_group(candidates: Sequence[View], group: Group) -> Sequence[View]:
    """Those for a request of that group: its own and those for anybody's, or all when the group has none."""
    return [view for view in candidates if view.group in (group, ANY)] or candidates
