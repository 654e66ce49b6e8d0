"""Chat requests for tests, as data: seeded random texts and pictures of odd sizes, in any order, in several messages.

A `Case` becomes an OpenAI request body (`body`) and, in reference.py, transformers' own inputs: both from the same parts.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

MODEL = "tiny"  # as every test cluster calls its model
SAID = (
    "What is in this picture and how many red boxes does it show next to the second one from the left "
    "Ein Bild sagt mehr als tausend Worte naïve café Übung 图片 里 有 什么 кошка 🐈 x=3.14; [42] (a|b) \\n \t -- END ?! 0007"
)
WORDS = SAID.split(" ")


@dataclass(frozen=True, slots=True)
class Picture:
    media_type: str
    data: bytes

    def url(self) -> str:
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    parts: tuple[str | Picture, ...]

    def content(self) -> str | list[dict[str, Any]]:
        """OpenAI form: a single text is a plain string."""
        if len(self.parts) == 1 and isinstance(self.parts[0], str):
            return self.parts[0]
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {"url": part.url()}}
            for part in self.parts
        ]


@dataclass(frozen=True, slots=True)
class Case:
    messages: tuple[ChatMessage, ...]
    max_tokens: int

    def pictures(self) -> list[Picture]:
        return [part for message in self.messages for part in message.parts if isinstance(part, Picture)]

    def body(self, **fields: Any) -> dict[str, Any]:
        """A greedy request. `fields` are added or win."""
        messages = [{"role": message.role, "content": message.content()} for message in self.messages]
        return {"model": MODEL, "messages": messages, "max_tokens": self.max_tokens, "temperature": 0, **fields}

    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.body(), sort_keys=True).encode()).hexdigest()[:32]


def picture(rng: random.Random, width: int, height: int, kind: str = "PNG") -> Picture:
    """A coarse pattern under noise: every picture is another one, and PNG cannot squeeze it to nothing."""
    noise = np.random.default_rng(rng.getrandbits(32))
    coarse = noise.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST), dtype=np.int16)
    pixels = np.clip(pixels + noise.integers(-20, 21, pixels.shape), 0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    if rng.random() < 0.15:
        image = image.convert("L")
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return Picture(f"image/{kind.lower()}", buffer.getvalue())


def odd_picture(rng: random.Random) -> Picture:
    return picture(rng, rng.randint(17, 150), rng.randint(17, 150), rng.choice(["PNG", "PNG", "JPEG"]))


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def chat(*parts: str | Picture, max_tokens: int = 16) -> Case:
    """One user message."""
    return Case((ChatMessage("user", parts),), max_tokens)


def random_case(seed: int, num_pictures: int | None = None) -> Case:
    """0 to 4 pictures anywhere in the text of 1 to 3 user turns, 1 to 48 output tokens; the same for the same seed."""
    rng = random.Random(f"case {seed}")
    pictures = rng.choice([0, 1, 1, 2, 3, 4]) if num_pictures is None else num_pictures
    num_turns = rng.choice([1, 1, 1, 2, 3])
    turns: list[list[str | Picture]] = [[text(rng, rng.choice([1, 3, 8, 20, 60, 150, 300]))] for _ in range(num_turns)]
    for _ in range(pictures):
        parts = rng.choice(turns)
        parts.insert(rng.randint(0, len(parts)), odd_picture(rng))
        if rng.random() < 0.5:
            parts.append(text(rng, rng.randint(1, 6)))
    messages = [ChatMessage("system", (text(rng, 5),))] if rng.random() < 0.3 else []
    for index, parts in enumerate(turns):
        if index:
            messages.append(ChatMessage("assistant", (text(rng, rng.randint(1, 10)),)))
        messages.append(ChatMessage("user", tuple(parts)))
    return Case(tuple(messages), rng.randint(1, 48))
