"""`/tokenize` and `/detokenize`, in vLLM's form: what a text or a chat is in tokens, and back. Takes CPU time: in a thread."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response

from triptych.services.router.api_types import ProcessorKwargs, read_messages
from triptych.services.router.asks import Bounds, Model
from triptych.services.router.client_link import BodyShare, ClientGoneError, read_body
from triptych.services.router.completion_types import DetokenizeRequest, TokenizeRequest
from triptych.services.router.edge import Edge, Read
from triptych.services.router.edge_model import decode_body, validated
from triptych.services.router.http_errors import as_typed, error_response
from triptych.services.router.unsupported import refuse_unsupported
from triptych.shared.errors import BadRequest


async def answer_quickly(edge: Edge, read: Read[dict[str, Any]], request: Request) -> Response:
    """The answer of one of the functions below, or its error."""
    settings, share = edge.settings, BodyShare(edge.bodies)
    try:
        body = await read_body(request, settings.max_body_bytes, settings.body_timeout_s, share.take)
        return JSONResponse(await edge.in_worker(read, body))
    except ClientGoneError:
        return Response()
    except Exception as error:
        return error_response(as_typed(error))
    finally:
        share.give_back()


def tokenize(body: bytes, model: Model, bounds: Bounds) -> dict[str, Any]:
    """Raises BadRequest."""
    data = decode_body(body, bounds.max_text_chars)
    refuse_unsupported(data)
    request = validated(TokenizeRequest, data)
    model.check(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("either prompt or messages must be given", param="prompt")
    if request.messages is not None:
        turns, images = read_messages(request.messages, ProcessorKwargs(), bounds.settings, bounds.max_text_chars)
        if images:
            raise BadRequest("pictures are not counted here", code="unsupported_image", param="messages")
        token_ids = list(model.prompts.build(turns, 0).token_ids)
    else:
        text = request.prompt or ""
        if len(text) > bounds.max_text_chars:
            raise BadRequest(
                "the prompt is far longer than the model's context", code="context_length_exceeded", param="prompt"
            )
        token_ids = model.prompts.encode(text, request.add_special_tokens)
    token_strs = [model.prompts.tokenizer.id_to_token(id_) for id_ in token_ids] if request.return_token_strs else None
    return {"count": len(token_ids), "max_model_len": bounds.max_model_len, "tokens": token_ids, "token_strs": token_strs}


def detokenize(body: bytes, model: Model, bounds: Bounds) -> dict[str, Any]:
    """Special tokens are shown. Ids without a token are nothing. Raises BadRequest."""
    request = validated(DetokenizeRequest, decode_body(body, bounds.max_text_chars))
    model.check(request.model)
    [text] = model.prompts.tokenizer.decode_batch([request.tokens], skip_special_tokens=False)  # `decode` holds the lock
    return {"prompt": text}
