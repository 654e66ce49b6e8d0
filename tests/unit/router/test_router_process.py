"""What the router's process must not load, and what its HTTP schema tells."""

from __future__ import annotations

import subprocess
import sys

from triptych.services.router.app import RouterService
from triptych.shared.settings import Settings


def test_the_router_never_imports_torch() -> None:
    code = "import sys, triptych.services.router.app; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_openapi_schema_shows_the_chat_request() -> None:
    service = RouterService(Settings())
    path = service.app.openapi()["paths"]["/v1/chat/completions"]["post"]
    properties = path["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"model", "messages", "max_tokens", "temperature", "stream"} <= set(properties)
