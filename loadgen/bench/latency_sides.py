"""What bench latency compares: a request to a real cluster, and its first token from the same engine called in this process.

Prompts and pictures differ from one request to the next, so that nothing kept from one helps another.
"""

from __future__ import annotations

import io
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import torch
from PIL import Image, ImageDraw

from triptych.loadgen.client import TRACE_HEADERS, AnswerFailed, chat_body, read_events, text_of
from triptych.shared.checkpoint import Checkpoint, image_info, resized
from triptych.shared.engine.api import Chunk, ImageSpan, Sequence
from triptych.shared.engine.torch_engine import load_engine
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import RequestId
from triptych.shared.policies.batching import num_blocks_for
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.settings import load_settings

PICTURE_SIZE = (224, 224)  # pixels: 64 vision tokens
MAX_TOKENS = 8  # chosen: enough to pass through all stages
FIRST_TOKEN_STAGES = ("preprocess", "encoder", "prefill")
_WORDS = ["red", "blue", "green", "circle", "square", "picture", "left", "right", "above", "below", "two", "three"]


@dataclass(frozen=True, slots=True)
class Question:
    """text, and perhaps one picture."""

    text: str
    picture: Image.Image | None


def random_question(rng: random.Random, with_picture: bool) -> Question:
    text = " ".join(rng.choice(_WORDS) for _ in range(12))
    return Question(text, _random_picture(rng) if with_picture else None)


def _random_picture(rng: random.Random) -> Image.Image:
    picture = Image.new("RGB", PICTURE_SIZE, "white")
    draw = ImageDraw.Draw(picture)
    for _ in range(3):
        x, y, size = rng.randrange(180), rng.randrange(180), rng.randrange(20, 90)
        draw.ellipse((x, y, x + size, y + size), fill=tuple(rng.randrange(256) for _ in range(3)))
    return picture


@dataclass(slots=True)
class ClusterSide:
    """A client of a cluster. num_text_tokens: of the last answer's prompt."""

    http: aiohttp.ClientSession
    url: str
    num_text_tokens: int = 0

    async def ask(self, question: Question) -> dict[str, float]:
        """ttft_ms as the client sees it; STAGE_queued_ms and so on as the trace tells; control_ms: TTFT less all of these."""
        body = chat_body(question.text, _png(question.picture), MAX_TOKENS, ignore_eos=True)
        began_s, ttft_s = time.perf_counter(), 0.0
        trace: dict[str, Any] = {}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=TRACE_HEADERS) as response:
            async for chunk in read_events(response):
                if not ttft_s and text_of(chunk):
                    ttft_s = time.perf_counter() - began_s
                trace = chunk.get("triptych") or trace
                if usage := chunk.get("usage"):
                    self.num_text_tokens = usage["prompt_tokens_details"]["text_tokens"]
        if not ttft_s or not trace:
            raise AnswerFailed("an answer has no text or no trace")
        return _accounted(1000 * ttft_s, trace)


def _png(picture: Image.Image | None) -> list[bytes]:
    if picture is None:
        return []
    file = io.BytesIO()
    picture.save(file, "PNG")
    return [file.getvalue()]


def _accounted(ttft_ms: float, trace: dict[str, Any]) -> dict[str, float]:
    spent = {
        f"{row['stage']}_{part}_ms": float(row[f"{part}_ms"])
        for row in trace["stages"]
        for part in ("queued", "transfer", "compute")
    }
    in_stages = sum(ms for name, ms in spent.items() if name.startswith(FIRST_TOKEN_STAGES))
    return {"ttft_ms": ttft_ms, **spent, "control_ms": ttft_ms - in_stages}


class EngineSide:
    """The cluster's engine, called without a cluster: encode, prefill, first token. Reading the picture isn't counted."""

    def __init__(self, checkpoint: Checkpoint, num_threads: int) -> None:
        self._checkpoint = checkpoint
        self._settings = load_settings(model=str(checkpoint.path))
        torch.set_num_threads(num_threads)
        self._engine = load_engine(checkpoint, self._settings)

    def ask(self, question: Question, num_text_tokens: int) -> dict[str, float]:
        """ttft_ms. Only the numbers of tokens are those of the question: what they say changes no time."""
        prompt = [token % 100 for token in range(num_text_tokens)]
        pixels, image = self._seen(question.picture)
        if image is not None:
            prompt[1:1] = [self._checkpoint.image_token_id] * image.num_tokens
        began_s = time.perf_counter()
        images = []
        if image is not None:
            images = [ImageSpan(1, image, embedded) for embedded in self._engine.encode([image], [pixels])]
        sequence = Sequence(RequestId("bench"), prompt, len(prompt), SamplingParams(max_tokens=MAX_TOKENS), images)
        sequence.block_table = self._engine.block_pool.allocate(num_blocks_for(len(prompt) + 1, self._engine.block_size))
        self._engine.prepare(sequence)
        while (left := len(prompt) - sequence.num_computed_tokens) > 0:
            self._engine.run([Chunk(sequence, min(left, self._settings.max_prefill_tokens))])
        ttft_s = time.perf_counter() - began_s
        self._engine.block_pool.free(sequence.block_table)
        return {"ttft_ms": 1000 * ttft_s}

    def _seen(self, picture: Image.Image | None) -> tuple[torch.Tensor, ImageInfo | None]:
        """A picture as preprocess hands it on."""
        if picture is None:
            return torch.empty(0), None
        options = self._checkpoint.image
        height, width = resized(picture.height, picture.width, options)
        pixels = torch.from_numpy(np.array(picture.resize((width, height), Image.Resampling.BICUBIC)))
        return pixels, image_info(height, width, options)
