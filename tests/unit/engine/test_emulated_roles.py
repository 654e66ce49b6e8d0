"""The very roles of real instances over emulated engines: outputs, modelled time, KV limits, nothing left over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from support.fake_cluster import ROUTER, FakeCluster, FakeHost, error_of, prompt_of, text_request, until
from triptych.services.host_context import HostContext
from triptych.services.instance import InstanceService
from triptych.shared.bus import Bus
from triptych.shared.cost_model.api import DecodeBatch, PrefillChunk
from triptych.shared.emulation import cost_model_of, open_model
from triptych.shared.errors import BadRequest
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import InstanceId, PlacedImage, PrefillRequest, RequestId, Role, stream_subject
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.service import ServiceContext
from triptych.shared.transport.stand_in import stand_in

MODEL = "qwen2.5-vl-7b"
FAST = 200.0  # modelled seconds a second


class EmulatedHost(FakeHost):
    """An InstanceService that opens its own engine."""

    async def _open(self) -> HostContext:
        context = await InstanceService._open(self)
        self.engine = cast(Any, context.engine)
        return context


class EmulatedCluster(FakeCluster):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"emulate": "a100", "model": MODEL, "time_scale": FAST, "kv_cache_bytes": 1 << 30} | settings)

    async def start(self, name: str, roles: Sequence[Role], engine: Any = None) -> FakeHost:
        host = EmulatedHost(self.settings, tuple(roles), engine)
        instance_id, bus = InstanceId(name), cast(Bus, self.bus)
        await host.start(ServiceContext(self.settings, instance_id, name, bus, self.registry, "", "127.0.0.1"))
        self.hosts[instance_id], self.bus.hosts[instance_id] = host, host.handle
        self.beat(instance_id)
        return host

    def compute_at(self, time_scale: float) -> None:
        """From now on, when the starts are over."""
        for host in self.hosts.values():
            cast(Any, host)._thread._time_scale = time_scale


async def test_a_request_that_is_handed_over_says_the_same() -> None:
    cluster = EmulatedCluster()
    for name, role in cast(list[tuple[str, Role]], [("p", "prefill"), ("d0", "decode"), ("d1", "decode")]):
        await cluster.start(name, [role])
    sampling = SamplingParams(120, temperature=1.0, seed=5)
    requests = [
        PrefillRequest(RequestId(id_), ROUTER, prompt_of(range(40)), (), sampling, 20.0) for id_ in ("undisturbed", "r")
    ]
    undisturbed = await cluster.generate("p", "d0", requests[0])
    reply = await cluster.prefill("p", requests[1])
    cluster.compute_at(2.0)  # seconds for the rest: it is not over before it moves
    await cluster.decode("d0", requests[1], reply)
    await until(lambda: len(cluster.stream("r").token_ids) > 3, "it runs")
    await cluster.hand_over("d0")
    await cluster.handed_over("r")
    cluster.compute_at(FAST)
    num_before = len(cluster.stream("r").token_ids)
    await cluster.go_on("d1", requests[1], reply)
    output = [reply.first_token, *(await cluster.finished("r")).token_ids]
    assert output == undisturbed
    assert len(output) > num_before + 1
    again = prompt_of([*range(40), *output[:50]])
    replayed = PrefillRequest(RequestId("again"), ROUTER, again, (), sampling, 20.0, num_output_tokens=50)
    assert (await cluster.prefill("p", replayed)).first_token == output[50]
    await cluster.release("again")
    await cluster.stop()


async def test_instances_that_stand_for_other_gpus_keep_their_roles() -> None:
    cluster = EmulatedCluster(emulate_encoder_tp=2)
    await cluster.start("e", ["encoder"])
    assert (await error_of(cluster.switch("e", "decode"))).code == "other_gpus"
    await cluster.start("d", ["decode"])
    await cluster.switch("d", "prefill", "encoder")
    await cluster.stop()


async def test_pictures_and_text_through_three_instances() -> None:
    cluster = EmulatedCluster()
    encoder, _, _ = [await cluster.start(role[0], [role]) for role in cast(list[Role], ["encoder", "prefill", "decode"])]
    image = ImageInfo(b"p" * 32, 56, 56, (1, 4, 4), 4)
    outputs = []
    for request_id in ("one", "two"):
        pixels = await encoder.transport.put(stand_in((56, 56, 3)), RequestId(request_id), 60.0)
        encoded = await cluster.encode("e", request_id, pixels, 4)
        placed = (PlacedImage(image, 2, encoded.embeddings),)
        token_ids = [1, 2, *[open_model(cluster.settings).image_token_id] * 4, 3]
        sampling = SamplingParams(12)
        request = PrefillRequest(RequestId(request_id), ROUTER, prompt_of(token_ids), placed, sampling, 10.0)
        outputs.append(await cluster.generate("p", "d", request))
        await cluster.release(request_id)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 12
    await cluster.stop()


async def test_a_picture_in_parts_from_two_encoders_gives_the_same_text() -> None:
    cluster = EmulatedCluster(model="internvl2.5-26b", tensor_store_bytes=1 << 30)
    for name, role in cast(list[tuple[str, Role]], [("e", "encoder"), ("f", "encoder"), ("p", "prefill"), ("d", "decode")]):
        await cluster.start(name, [role])
    image = ImageInfo(b"p" * 32, 1344, 1792, (13, 1, 1025), 13 * 256, 13)
    token_ids = [1, 2, *[open_model(cluster.settings).image_token_id] * image.num_tokens, 3]
    outputs = []
    for request_id, parts in (("whole", [image]), ("divided", [image.part(0, 7), image.part(7, 6)])):
        pixels = await cluster.hosts[InstanceId("d")].transport.put(stand_in((1344, 1792, 3)), RequestId(request_id), 60.0)
        replies = await asyncio.gather(
            *(cluster.encode_image(name, request_id, part, pixels) for name, part in zip("ef", parts, strict=False))
        )
        offsets = [2 + 256 * (part.first_piece or 0) for part in parts]
        placed = [PlacedImage(part, at, reply.embeddings) for part, at, reply in zip(parts, offsets, replies, strict=True)]
        request = PrefillRequest(RequestId(request_id), ROUTER, prompt_of(token_ids), tuple(placed), SamplingParams(12), 10.0)
        outputs.append(await cluster.generate("p", "d", request))
        await cluster.release(request_id)
    assert outputs[0] == outputs[1]
    await cluster.stop()


async def test_a_request_takes_its_modelled_time() -> None:
    cluster = EmulatedCluster(kv_cache_bytes=4 << 30)
    cost = cost_model_of(cluster.settings)
    await cluster.start("p", ["prefill"])
    await cluster.start("d", ["decode"])
    cluster.compute_at(1.0)
    begun_s = time.monotonic()
    await cluster.generate("p", "d", text_request("r", range(2000), 20))
    spent_s = time.monotonic() - begun_s
    least_s = 4 * cost.prefill_s([PrefillChunk(500)]) + 19 * cost.decode_s(DecodeBatch(1, 2000))
    assert spent_s >= 0.99 * least_s > 0.2
    await cluster.stop()


async def test_starting_takes_its_time() -> None:
    cluster = EmulatedCluster()
    startup_s = cost_model_of(cluster.settings).startup_s
    begun_s = time.monotonic()
    await cluster.start("d", ["decode"])
    assert time.monotonic() - begun_s >= startup_s / FAST > 0.1
    await cluster.stop()


async def test_kv_is_a_bound_and_preemption_changes_nothing() -> None:
    """Room for 60 blocks of 16 tokens: 12 requests that grow to 6 or 7 blocks each wait for each other, and are preempted."""
    cluster = EmulatedCluster(kv_cache_bytes=60 * 16 * 57344)
    await cluster.start("p", ["prefill"])
    decode = await cluster.start("d", ["decode"])
    cluster.compute_at(4.0)
    requests = [text_request(f"r{i}", range(i, i + 40), 64) for i in range(12)]
    alone = [await cluster.generate("p", "d", request) for request in requests[:3]]
    again = [text_request(f"s{i}", range(i, i + 40), 64) for i in range(12)]
    outputs = await asyncio.gather(*(cluster.generate("p", "d", request) for request in again))
    assert outputs[:3] == alone
    assert all(len(output) == 64 for output in outputs)
    assert decode.role.num_preemptions > 0
    for request in (*requests, *again):
        await cluster.release(request.request_id)
    await cluster.stop()


async def test_steps_that_are_one_call_say_what_single_ones_do_in_fewer_messages() -> None:
    said, num_messages = [], []
    for interval_s in (0.0, 0.02):
        cluster = EmulatedCluster(stream_interval_s=interval_s)
        await cluster.start("p", ["prefill"])
        await cluster.start("d", ["decode"])
        requests = [text_request(f"r{i}", range(i, i + 40), 30 + 20 * i) for i in range(4)]
        said.append(await asyncio.gather(*(cluster.generate("p", "d", request) for request in requests)))
        num_messages.append(len(cluster.bus.events[stream_subject(ROUTER)]))
        for request in requests:
            await cluster.release(request.request_id)
        await cluster.stop()
    assert said[0] == said[1]
    assert [len(output) for output in said[0]] == [30, 50, 70, 90]
    assert num_messages[1] < num_messages[0] / 3


async def test_who_joins_or_leaves_waits_for_the_step_under_way_only() -> None:
    """Steps of 0.2 s, of which five or six are one call."""
    cluster = EmulatedCluster(stream_interval_s=1.0)
    await cluster.start("p", ["prefill"])
    decode = await cluster.start("d", ["decode"])
    running, joining = [text_request(id_, range(40), 2000) for id_ in ("running", "joining")]
    replies = [await cluster.prefill("p", request) for request in (running, joining)]
    cluster.compute_at(0.05)
    await cluster.decode("d", running, replies[0])
    await until(lambda: len(cluster.stream("running").token_ids) == 1, "its KV is here, its next steps are one call")
    await cluster.decode("d", joining, replies[1])
    await until(lambda: decode.role.load().num_running == 2, "it joins")
    assert len(cluster.stream("running").token_ids) < 5
    await until(lambda: len(cluster.stream("joining").token_ids) == 1, "its KV is here, their next steps are one call")
    [leaving] = [job for job in decode.role._jobs if job.request.request_id == "joining"]
    begun_s = time.monotonic()
    await cluster.release("joining")
    await until(lambda: not leaving.sequence.block_table, "its blocks are free")
    assert time.monotonic() - begun_s < 0.9
    await cluster.release("running")
    await cluster.stop()


async def test_a_setting_that_cannot_be_is_told_before_the_start_takes_its_time() -> None:
    cluster = EmulatedCluster(kv_cache_bytes=1 << 16, time_scale=0.001)
    with pytest.raises(BadRequest, match="kv_cache_bytes is less than one KV block"):
        await asyncio.wait_for(cluster.start("d", ["decode"]), 10.0)
