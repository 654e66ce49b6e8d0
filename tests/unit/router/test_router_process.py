"""What the router's HTTP schema tells."""

from __future__ import annotations

from triptych.services.router.app import RouterService
from triptych.shared.settings import Settings


def test_the_openapi_schema_shows_the_chat_request() -> None:
    service = RouterService(Settings())
    path = service.app.openapi()["paths"]["/v1/chat/completions"]["post"]
    properties = path["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"model", "messages", "max_tokens", "temperature", "stream"} <= set(properties)
