"""What the model is shown, seen from outside: odd files as what a viewer shows, and no more pixels than were asked for."""

from __future__ import annotations

import base64
from typing import Any

import httpx
from PIL import Image

from support.cases import MODEL
from support.cluster import Cluster
from support.odd_pictures import ODD, file, noise

WITH_LIMIT = {"mm_processor_kwargs": {"max_pixels": 84 * 56}}


async def _answer(http: httpx.AsyncClient, picture: bytes, **fields: Any) -> tuple[str, int]:
    """Text and number of prompt tokens."""
    url = f"data:application/octet-stream;base64,{base64.b64encode(picture).decode()}"
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 16, "temperature": 0, **fields}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]["prompt_tokens"]


async def test_an_odd_picture_is_answered_as_its_plain_equivalent(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False) as http:
        said = set()
        for name in ("JPEG orientation 6", "rgba", "grey 16 bits ramp", "cmyk jpeg", "animated GIF"):
            encoded, plain = ODD[name]
            answer = await _answer(http, encoded)
            assert answer == await _answer(http, file(plain)), name
            said.add(answer)
        assert len(said) > 1


async def test_a_pixel_limit_is_as_good_as_a_smaller_picture(cluster: Cluster) -> None:
    picture = noise(168, 112)
    small = picture.resize((84, 56), Image.Resampling.BICUBIC)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False) as http:
        limited = await _answer(http, file(picture), **WITH_LIMIT)
        assert limited == await _answer(http, file(small)) == await _answer(http, file(small), **WITH_LIMIT)
        assert limited[1] < (await _answer(http, file(picture)))[1]
