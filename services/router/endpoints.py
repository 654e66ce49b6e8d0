"""The router's HTTP paths: the OpenAI API and the probes that need to know the whole pipeline."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.routing import request_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.services.router.api_types import ChatCompletionRequest
from triptych.services.router.completion_types import CompletionRequest, DetokenizeRequest, TokenizeRequest
from triptych.services.router.edge_model import EdgeModel
from triptych.services.router.session import CHAT, COMPLETIONS, Api
from triptych.shared.errors import BadRequest

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class RouterView(Protocol):
    """What the paths need of the router."""

    async def answer(self, api: Api, request: Request) -> Response: ...

    async def tokenize(self, request: Request) -> Response: ...

    async def detokenize(self, request: Request) -> Response: ...

    def models(self) -> list[dict[str, Any]]: ...

    def readiness(self) -> tuple[bool, dict[str, Any]]: ...

    def emulation(self) -> dict[str, Any]: ...

    def new_request_id(self) -> str: ...


def add_endpoints(app: FastAPI, router: RouterView) -> None:
    """Probes that need no pipeline (/live, /metrics) are added by the process's frame."""

    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions. Answers JSON, or server-sent events when `stream` is true."""
        return await router.answer(CHAT, request)

    async def completions(request: Request) -> Response:
        """OpenAI's completions of plain prompts. Answers JSON, or server-sent events when `stream` is true."""
        return await router.answer(COMPLETIONS, request)

    async def tokenize(request: Request) -> Response:
        """A text, or a chat with the model's template, as tokens."""
        return await router.tokenize(request)

    async def detokenize(request: Request) -> Response:
        """Tokens as text."""
        return await router.detokenize(request)

    async def models() -> dict[str, Any]:
        """The model, once every stage is there."""
        return {"object": "list", "data": router.models()}

    async def model(model_id: str) -> dict[str, Any]:
        for found in router.models():
            if found["id"] == model_id:
                return found
        raise BadRequest("there is no such model here", code="model_not_found", status=404, param="model")

    async def version() -> dict[str, Any]:
        return {"version": metadata.version("triptych"), **router.emulation()}

    async def ready() -> JSONResponse:
        """200 when every stage has an instance and requests are taken; the instances per stage either way."""
        is_ready, body = router.readiness()
        return JSONResponse({**body, **router.emulation()}, status_code=200 if is_ready else 503)

    _add_post(app, "/v1/chat/completions", chat_completions, ChatCompletionRequest)
    _add_post(app, "/v1/completions", completions, CompletionRequest)
    _add_post(app, "/tokenize", tokenize, TokenizeRequest)
    _add_post(app, "/detokenize", detokenize, DetokenizeRequest)
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"])
    app.add_api_route("/version", version, methods=["GET"])
    for path in ("/ready", "/health"):
        app.add_api_route(path, ready, methods=["GET"])
    app.add_middleware(RequestIds, router=router)


def _add_post(app: FastAPI, path: str, endpoint: Callable[[Request], Awaitable[Response]], body: type[EdgeModel]) -> None:
    """The endpoint reads the body itself, off the event loop: `body` is for the API's description."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    described = {"required": True, "content": {"application/json": {"schema": _inline(schema, definitions)}}}
    app.router.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        response_model=None,
        openapi_extra={"requestBody": described},
        route_class_override=DescribedRoute,
    )


class DescribedRoute(APIRoute):
    """FastAPI describes it and is then out of the way: the endpoint takes the request as it is."""

    def __init__(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = request_response(endpoint)


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with its definitions in place: they have no components section to live in."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}


class RequestIds:
    """Every answer carries X-Request-Id: the client's when it is a plain one, else a new one. Only for the client's use: what
    stages see is always our own."""

    def __init__(self, app: ASGIApp, router: RouterView) -> None:
        self._app = app
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else self._router.new_request_id()

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            return send(message)

        await self._app(scope, receive, send_with_id)
