"""What requests share in the cache, counted by the services: pictures again, in another order, in a later turn; and that
nothing is shared across tenants, whose salts differ.
"""

from __future__ import annotations

import dataclasses
import io
import random
import time
from collections import Counter
from typing import Any

import aiohttp
import pytest
from PIL import Image

from support.cases import Case, ChatMessage, Picture, odd_picture, text
from support.client import Answer, ask, session
from support.cluster import Cluster
from support.reference import Reference
from support.watch import Watch
from triptych.loadgen.bench.service_counters import service_counters

PICTURE_WORK = ("pictures_decoded", "pixel_transfers", "images_encoded")
NONE = dict.fromkeys(PICTURE_WORK, 0)
WARM_WITHIN_S = 20.0  # chosen: what holders tell reaches the index in milliseconds, unless the machine is busy
NUM_PICTURES = 3
MAX_COMMON_TOKENS = 32  # what the template puts before every message, in whole blocks: other tests asked without a salt, too


def conversation(rng: random.Random) -> Case:
    parts = [part for _ in range(NUM_PICTURES) for part in (text(rng, 12), odd_picture(rng))]
    return Case((ChatMessage("user", (*parts, text(rng, 6))),), 12)


def turned(case: Case) -> Case:
    """The same pictures, the last one first."""
    [message] = case.messages
    pictures = iter(case.pictures()[::-1])
    parts = tuple(part if isinstance(part, str) else next(pictures) for part in message.parts)
    return dataclasses.replace(case, messages=(dataclasses.replace(message, parts=parts),))


def saved_anew(case: Case) -> Case:
    """The same pixels in other files."""

    def saved(shown: Picture) -> Picture:
        file = io.BytesIO()
        with Image.open(io.BytesIO(shown.data)) as image:
            image.convert("RGB").save(file, "PNG", compress_level=1)
        return Picture("image/png", file.getvalue())

    [message] = case.messages
    parts = tuple(part if isinstance(part, str) else saved(part) for part in message.parts)
    return dataclasses.replace(case, messages=(dataclasses.replace(message, parts=parts),))


def next_turn(case: Case, answer: str) -> Case:
    """Text alone, after the answer."""
    more = (ChatMessage("assistant", (answer,)), ChatMessage("user", ("And which of them is the largest?",)))
    return dataclasses.replace(case, messages=(*case.messages, *more))


class Client:
    """Asks one request after the other; what the services did for each."""

    def __init__(self, http: aiohttp.ClientSession, url: str, urls: list[str], reference: Reference) -> None:
        self._http, self._url, self._urls, self._reference = http, url, urls, reference

    async def work_for(self, case: Case, **fields: Any) -> tuple[Answer, dict[str, int]]:
        """The answer, which is transformers'."""
        before = await self._counters()
        answer = await ask(self._http, self._url, case, **fields)
        assert not (verdict := self._reference.judge(case, answer)).startswith("wrong"), verdict
        work = await self._counters() - before
        return answer, {name: work[name] for name in PICTURE_WORK}

    async def once_known(self, case: Case, **fields: Any) -> Answer:
        """The answer that takes no work for pictures, once the index has heard who holds them."""
        until_s = time.monotonic() + WARM_WITHIN_S
        while True:
            answer, work = await self.work_for(case, **fields)
            if work == NONE:
                return answer
            assert time.monotonic() < until_s, f"asked again, it took {work}"

    async def _counters(self) -> Counter[str]:
        return await service_counters(self._http, self._urls)


def num_cached(answer: Answer) -> int:
    assert answer.usage is not None
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.timeout(120)
async def test_pictures_are_worked_on_once_for_each_tenant(cluster: Cluster, reference: Reference) -> None:
    case = conversation(random.Random("sharing"))
    everything = dict.fromkeys(PICTURE_WORK, NUM_PICTURES)
    prompts = reference.answer(case).num_prompt_tokens
    async with session() as http, Watch(cluster.nats_url) as watch:
        await watch.until_complete()
        client = Client(http, cluster.url, [beat.http_url for beat in watch.living().values() if beat.http_url], reference)
        for tenant in ("tenant-one", "tenant-two", ""):
            answer, work = await client.work_for(case, cache_salt=tenant)
            assert work == everything, f"{tenant} gets what others asked for"
            assert num_cached(answer) <= (0 if tenant else MAX_COMMON_TOKENS), f"{tenant} gets what others asked for"
            again = await client.once_known(case, cache_salt=tenant)
            assert prompts - 16 <= num_cached(again) < prompts, "all but the last block, or token"
            later = await client.once_known(next_turn(case, answer.text), cache_salt=tenant)
            assert num_cached(later) >= prompts - 16
        other_order = await client.once_known(turned(case))
        assert num_cached(other_order) < prompts // 2, "the KV of pictures that stand elsewhere is another"
        anew, work = await client.work_for(saved_anew(case))
        assert work == NONE | {"pictures_decoded": NUM_PICTURES}, "the pixels are known, whatever file they are in"
        assert anew.text == answer.text
