"""How large the model is to see a picture: `detail` as OpenAI has it, `mm_processor_kwargs` as vLLM has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.services.router.api_types import LOW_DETAIL_PIXELS, parse_chat
from triptych.services.router.data_url import read_source
from triptych.shared.errors import BadRequest
from triptych.shared.image_info import PixelLimits
from triptych.shared.settings import Settings


def _parse(detail: Any, **fields: Any) -> PixelLimits:
    """What is asked of preprocess for a picture that comes after one without any wishes."""
    url = {"url": "data:image/png;base64,AAAA"}
    content = [{"type": "image_url", "image_url": url}, {"type": "image_url", "image_url": url | {"detail": detail}}]
    body = {"messages": [{"role": "user", "content": content}], **fields}
    first, second = parse_chat(json.dumps(body).encode(), Settings(), 1000).images
    if not fields:
        assert first.limits == PixelLimits()
    assert read_source(second, 1000).limits == second.limits
    return second.limits


@pytest.mark.parametrize(
    ("detail", "wanted", "limits"),
    [
        *((detail, {}, PixelLimits()) for detail in (None, "auto", "high", "original")),
        ("low", {}, PixelLimits(max_pixels=LOW_DETAIL_PIXELS)),
        ("high", {"min_pixels": 3136, "max_pixels": 50_176}, PixelLimits(3136, 50_176)),
        ("high", {"min_pixels": 3136, "max_pixels": None}, PixelLimits(3136)),
        ("low", {"max_pixels": 50_176}, PixelLimits(None, 50_176)),
        ("low", {"min_pixels": 3136, "max_pixels": 1_000_000}, PixelLimits(3136, LOW_DETAIL_PIXELS)),
    ],
)
def test_wishes(detail: str | None, wanted: dict[str, Any], limits: PixelLimits) -> None:
    assert _parse(detail, **({"mm_processor_kwargs": wanted} if wanted else {})) == limits


@pytest.mark.parametrize(
    ("detail", "fields", "param"),
    [
        ("tiny", {}, "messages.[0].content.[1].image_url.detail"),
        (3, {}, "messages.[0].content.[1].image_url.detail"),
        ("low", {"mm_processor_kwargs": {"max_pixels": 0}}, "mm_processor_kwargs.max_pixels"),
        ("low", {"mm_processor_kwargs": {"min_pixels": "many"}}, "mm_processor_kwargs.min_pixels"),
        ("low", {"mm_processor_kwargs": {"min_pixels": 10**30}}, "mm_processor_kwargs.min_pixels"),
        ("low", {"mm_processor_kwargs": {"min_pixels": 2, "max_pixels": 1}}, "mm_processor_kwargs"),
        ("low", {"mm_processor_kwargs": [1]}, "mm_processor_kwargs"),
        ("low", {"mm_processor_kwargs": {"num_crops": 4}}, "mm_processor_kwargs"),
        ("low", {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}}, "media_io_kwargs"),
    ],
)
def test_what_is_no_wish(detail: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        _parse(detail, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
