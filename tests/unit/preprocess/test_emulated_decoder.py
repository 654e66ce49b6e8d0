"""Emulated preprocessing: sizes from headers, modelled time on so many cores, bounds, and pictures that are none."""

from __future__ import annotations

import asyncio
import io
import time

import pytest
from PIL import Image

from triptych.services.preprocess.decode import DecodeOptions
from triptych.services.preprocess.decode_pool import TimedImage
from triptych.services.preprocess.emulated import EmulatedDecoder
from triptych.shared.emulation import cost_model_of, open_model
from triptych.shared.errors import BadRequest, Overloaded
from triptych.shared.image_info import PixelLimits
from triptych.shared.settings import Settings


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


async def decoded(settings: Settings, encoded: bytes, limits: PixelLimits | None = None) -> TimedImage:
    checkpoint = open_model(settings)
    image = checkpoint.image if limits is None else checkpoint.image.within(limits)
    options = DecodeOptions(image, checkpoint.revision, settings.max_image_pixels)
    async with EmulatedDecoder(settings).decoded(encoded, options, "messages") as timed:
        return timed


def of(model: str, **given: object) -> Settings:
    return Settings(emulate="a100", model=model, **{"time_scale": 1000.0} | given)  # type: ignore[arg-type]


async def test_each_family_cuts_its_own_way() -> None:
    qwen = (await decoded(of("qwen2.5-vl-7b"), png(896, 896))).image.info
    assert (qwen.height, qwen.width, qwen.grid_thw, qwen.num_tokens) == (896, 896, (1, 64, 64), 1024)
    smaller = await decoded(of("qwen2.5-vl-7b"), png(896, 896), PixelLimits(max_pixels=448 * 448))
    assert smaller.image.info.num_tokens == 256
    intern = (await decoded(of("internvl2.5-26b"), png(896, 896))).image.info
    assert (intern.grid_thw, intern.num_tokens, intern.num_pieces) == ((5, 1, 1025), 1280, 5)
    llama = (await decoded(of("llama-3.2-11b"), png(896, 896))).image.info
    assert (llama.grid_thw, llama.num_tokens) == ((1, 1, 6404), 1601)
    assert qwen.num_pieces == llama.num_pieces == 1, "their towers attend across a picture"


async def test_equal_bytes_are_equal_pictures() -> None:
    settings = of("llama-3.2-11b")
    digests = [(await decoded(settings, picture)).image.info.mm_hash for picture in (png(9, 9), png(9, 9), png(9, 10))]
    assert digests[0] == digests[1] != digests[2]


async def test_cores_take_turns_and_a_queue_has_a_bound() -> None:
    settings = of("qwen2.5-vl-7b", time_scale=1.0, decode_workers=1, max_waiting=1)
    checkpoint = open_model(settings)
    options = DecodeOptions(checkpoint.image, checkpoint.revision, settings.max_image_pixels)
    decoder, picture = EmulatedDecoder(settings), png(1000, 1000)

    async def one() -> None:
        async with decoder.decoded(picture, options, "messages"):
            pass

    begun_s = time.monotonic()
    tasks = [asyncio.create_task(one()) for _ in range(3)]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in done] == [type(None), type(None), Overloaded]
    assert time.monotonic() - begun_s >= 2 * cost_model_of(settings).preprocess_s(1000, 1000) > 0.1
    assert (decoder.num_running, decoder.num_waiting) == (0, 0)


@pytest.mark.parametrize("encoded", [b"", b"no picture", png(4000, 10)], ids=["empty", "text", "thin"])
async def test_what_is_no_picture_is_refused(encoded: bytes) -> None:
    with pytest.raises(BadRequest):
        await decoded(of("qwen2.5-vl-7b"), encoded)
