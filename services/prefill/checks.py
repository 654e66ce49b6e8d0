"""What a prefill request must be before anything is pulled or computed for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.cache.block_keys import ImagePlace
from triptych.shared.errors import BadRequest, InternalError
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import PlacedImage, PrefillRequest, TensorRef
from triptych.shared.token_bytes import BYTES_PER_TOKEN


def check_request(request: PrefillRequest, max_model_len: int) -> None:
    """Refuse what can't be computed.

    Raises:
        BadRequest: the prompt can never fit.
        InternalError: its token bytes or its images' places don't add up: a router's bug, nothing that a client did.
    """
    prompt = request.prompt
    if prompt.num_tokens < 1:
        raise InternalError("the prompt is empty", code="invalid_message")
    if prompt.num_tokens >= max_model_len:
        raise BadRequest(
            f"the prompt has {prompt.num_tokens} tokens, and prompt and output together may have {max_model_len}",
            code="context_length_exceeded",
            param="messages",
        )
    if request.sampling.max_tokens < 1:
        raise InternalError("max_tokens must be at least 1", code="invalid_message")
    num_bytes = prompt.leased.num_bytes if prompt.leased is not None else len(prompt.inline)
    if num_bytes != BYTES_PER_TOKEN * prompt.num_tokens:
        raise InternalError("the prompt's bytes are not what its number of tokens says", code="invalid_message")
    if not 0 <= request.num_output_tokens < min(prompt.num_tokens, request.sampling.max_tokens):
        raise InternalError("the request has no prompt, or nothing is left to generate", code="invalid_message")
    _check_images(request)


def _check_images(request: PrefillRequest) -> None:
    end = 0
    before: ImageInfo | None = None
    for placed in request.images:
        if placed.offset < end:
            raise InternalError("images overlap or are out of order in the prompt", code="invalid_message")
        if placed.image.first_piece and not (before is not None and placed.offset == end and _goes_on(before, placed.image)):
            raise InternalError("a part of an image is not where the part before it ends", code="invalid_message")
        if placed.image.num_tokens < 1:
            raise InternalError("an image has no vision tokens", code="invalid_message")
        end, before = placed.offset + placed.image.num_tokens, placed.image
        if placed.embeddings is not None:
            check_embeddings(placed, placed.embeddings)
    if end > request.prompt.num_tokens:
        raise InternalError("an image goes beyond the prompt's end", code="invalid_message")


def image_places(images: Iterable[PlacedImage]) -> list[ImagePlace]:
    """Of whole images, by which the prompt is keyed in whichever parts they come."""
    places: list[ImagePlace] = []
    for placed in images:
        image, offset, num_tokens = placed.image, placed.offset, placed.image.num_tokens
        if image.first_piece:  # goes on where the part before it ends
            before = places.pop()
            offset, num_tokens = before.offset, before.num_tokens + num_tokens
        places.append(ImagePlace(image.mm_hash, offset, num_tokens))
    return places


def _goes_on(before: ImageInfo, image: ImageInfo) -> bool:
    """Whether an image's part is the one after another."""
    return (before.mm_hash, (before.first_piece or 0) + before.num_pieces) == (image.mm_hash, image.first_piece)


def check_embeddings(placed: PlacedImage, embeddings: TensorRef) -> None:
    """Raises InternalError when they can't be those of the image."""
    if len(embeddings.shape) != 2 or embeddings.shape[0] != placed.image.num_tokens:
        raise InternalError("an image's embeddings are not what its number of tokens says", code="invalid_message")
