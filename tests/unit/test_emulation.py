"""What is served when GPUs are emulated: a model by name, settings of GPU instances, and what is refused."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from triptych.services.router.api_types import ChatTurn
from triptych.services.router.prompt import PromptBuilder
from triptych.shared.cost_model.models import MODELS
from triptych.shared.emulation import (
    FOLDER,
    cost_model_of,
    emulated_settings,
    link_of,
    num_slots,
    open_model,
    startup_s,
    word_ids,
)
from triptych.shared.errors import BadRequest
from triptych.shared.settings import Settings

LLAMA = Settings(emulate="a100", model="llama-3.2-11b")


@pytest.mark.parametrize("model", MODELS)
def test_every_model_of_the_cost_model_opens(model: str) -> None:
    opened = open_model(Settings(emulate="h100", model=model, model_name="mine", time_scale=3, emulate_tp=2))
    assert (opened.name, str(opened.emulation)) == ("mine", "emulated h100, 3 modelled seconds a second")
    assert opened.max_position_embeddings >= 32_768
    assert opened.card(100).emulation == opened.emulation
    assert opened.revision == open_model(Settings(emulate="a100", model=model)).revision


def test_a_chat_becomes_about_as_many_tokens_as_with_a_real_tokenizer() -> None:
    """A real one makes 4.4 characters of English a token, this small one three and more."""
    opened = open_model(LLAMA)
    builder = PromptBuilder(opened)
    text = "Describe the picture: how many people are in it, and what are they doing? Which colour is the car on the left?"
    prompt = builder.build([ChatTurn("user", (None, text))], 1)
    token_ids = builder.encode(text, add_special_tokens=False)
    assert 2.8 < len(text) / len(token_ids) < 4.5
    assert prompt.num_text_tokens == len(token_ids) + 10, "the template's"
    assert [prompt.token_ids[at] for at in prompt.placeholder_at] == [opened.image_token_id]
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.decode(token_ids) == text
    assert opened.config["vocab_size"] == tokenizer.get_vocab_size()
    assert len(word_ids()) > 1000


def test_what_was_set_stays_and_the_rest_suits_a_gpu() -> None:
    given = LLAMA.model_copy(update={"max_num_seqs": 7, "time_scale": 0.1})
    settings = emulated_settings(given)
    assert settings.max_num_seqs == 7
    assert settings.kv_cache_bytes == cost_model_of(LLAMA).memory.kv_capacity_bytes > 40e9
    deadlines = (settings.request_timeout_s, settings.transfer_timeout_s, settings.stage_wait_s, settings.drain_timeout_s)
    assert deadlines == (1200.0, 150.0, 200.0, 300.0), "deadlines are real time, of which everything takes ten times as much"
    assert emulated_settings(settings) == settings
    plain = Settings(model="x")
    assert emulated_settings(plain) is plain


def test_an_encode_batch_holds_as_many_vision_tokens_of_every_family() -> None:
    """Those of cross-attention models are counted by slots, a quarter of them."""
    for model, num_tokens in (("llama-3.2-11b", 4096), ("qwen2.5-vl-7b", 16_384), ("internvl2.5-26b", 16_384)):
        assert emulated_settings(Settings(emulate="a100", model=model)).max_encode_tokens == num_tokens


def test_the_slowest_instance_says_how_long_a_start_takes() -> None:
    wide = Settings(emulate="a100", model="llama-3.2-11b", emulate_tp=8, time_scale=0.01)
    assert startup_s(wide) == 100 * cost_model_of(wide, ("encoder",)).startup_s > 100 * cost_model_of(wide).startup_s > 2000
    assert startup_s(Settings(model="x")) == 0.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"time_scale": 2.0}, "time_scale: only for emulated"),
        ({"emulate_tp": 2, "emulate_link": "tcp"}, "emulate_link, emulate_tp: only for emulated"),
        ({"emulate": "a100", "device": "cuda"}, "device is cuda"),
        ({"emulate": "a100", "kv_cache_bytes": 80 << 30}, "Llama-3.2-11B-Vision on 1 x A100-80G has 5"),
        ({"emulate": "a100", "kv_cache_bytes": 1 << 62}, "kv_cache_bytes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadRequest, match=said) as caught:
        emulated_settings(Settings(model="llama-3.2-11b", **given))  # type: ignore[arg-type]
    assert "\n" not in caught.value.message


def test_pictures_of_cross_attention_models_take_slots() -> None:
    assert num_slots(cost_model_of(LLAMA), 6404) == 1601
    assert num_slots(cost_model_of(Settings(emulate="a100", model="qwen2.5-vl-7b")), 1024) == 1024


def test_encoders_and_links_have_settings_of_their_own() -> None:
    settings = Settings(emulate="a100", model="llama-3.2-11b", emulate_tp=4, emulate_encoder_tp=2, emulate_link="tcp")
    assert [cost_model_of(settings, roles).tp for roles in (("encoder",), ("encoder", "prefill"), ())] == [2, 4, 4]
    assert link_of(settings).bytes_per_s < link_of(LLAMA).bytes_per_s


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"emulate": "b200", "model": "llama-3.2-11b"}, "there are a100"),
        ({"emulate": "a100", "model": "gpt-2"}, "there are qwen2.5-vl-7b"),
        ({"emulate": "a100", "model": "qwen2.5-vl-7b", "emulate_tp": 3}, "TP 3"),
        ({"emulate": "a100", "model": "qwen2.5-vl-7b", "emulate_encoder_tp": 3}, "TP 3"),
    ],
)
def test_what_there_are_no_figures_for_is_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        open_model(Settings(**given))  # type: ignore[arg-type]
