"""One request of a trace, whatever form the trace was published in. Readers make these, replay and the simulator use them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRow:
    """arrival_s: after the trace's first request. num_context_tokens: text and image tokens together, as traces count them.

    num_image_tokens: None where the trace does not say. session, turn: a conversation's name and the place in it, from 0;
    None, 0 for a request of its own. prefix_ids: names of the blocks that the prompt begins with, of prefix_block_size tokens
    each: two requests whose first k ids are equal share k blocks (Mooncake's and Bailian's hash_ids); empty: nothing is known.
    image_ids: names of the pictures, one for each: equal ones are the same picture; empty: all pictures are new.
    """

    arrival_s: float
    num_context_tokens: int
    num_output_tokens: int
    num_images: int = 0
    num_image_tokens: int | None = None
    session: str | None = None
    turn: int = 0
    prefix_ids: tuple[int, ...] = ()
    prefix_block_size: int = 0
    image_ids: tuple[int, ...] = ()

    @property
    def request_class(self) -> str:
        """Either `image` or `text`: the two modality classes of both papers."""
        return "image" if self.num_images else "text"
