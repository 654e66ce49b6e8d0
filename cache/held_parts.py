"""Who holds which part of an image's embeddings, as the index has it: under the mm_hash of the whole, a holder of a part is
written INSTANCE#FIRST+NUM, after its pieces. Pure. The holder writes, the router reads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from triptych.shared.image_info import ImageInfo, PartKey
from triptych.shared.messages import InstanceId

_PART = re.compile(r"(.+)#(\d{1,9})\+(\d{1,9})")


@dataclass(frozen=True, slots=True)
class HeldPart:
    """An instance that has num_pieces of an image, from first_piece on; None: all of it."""

    instance_id: InstanceId
    first_piece: int | None = None
    num_pieces: int = 0

    @classmethod
    def of(cls, instance_id: InstanceId, image: ImageInfo) -> HeldPart:
        """An instance that has just that image, or part."""
        return cls(instance_id, image.first_piece, image.num_pieces)

    def is_of(self, image: ImageInfo) -> bool:
        """Whether it is just that image, or part."""
        return self.first_piece == image.first_piece and (self.first_piece is None or self.num_pieces == image.num_pieces)


def holder_of(instance_id: InstanceId, key: PartKey) -> InstanceId:
    """How a holder of that image or part is written."""
    _, first, num = key
    return instance_id if first is None else InstanceId(f"{instance_id}#{first}+{num}")


def held_part(holder: InstanceId) -> HeldPart:
    """What was written."""
    match = _PART.fullmatch(holder)
    return HeldPart(holder) if match is None else HeldPart(InstanceId(match[1]), int(match[2]), int(match[3]))


def cover(image: ImageInfo, held: Collection[HeldPart]) -> list[ImageInfo]:
    """The image in parts that are held, and what is missing between them; one part where nothing is held, or all in one."""
    if any(part.first_piece is None for part in held):
        return [image]
    parts, end = [], 0
    for first, num in sorted(_ranges(held), key=lambda part: (part[0], -part[1])):
        if first < end or first + num > image.num_pieces:
            continue
        if first > end:
            parts.append(image.part(end, first - end))
        parts.append(image.part(first, num))
        end = first + num
    return [*parts, image.part(end, image.num_pieces - end)] if end < image.num_pieces else parts


def _ranges(held: Iterable[HeldPart]) -> set[tuple[int, int]]:
    return {(part.first_piece, part.num_pieces) for part in held if part.first_piece is not None and part.num_pieces > 0}
