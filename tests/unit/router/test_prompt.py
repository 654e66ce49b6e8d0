"""Prompts tokenize as transformers does it, text never becomes a special token, and images get their place."""

from __future__ import annotations

import json
import re
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fake_stages import SPECIAL, TEMPLATE, write_toy_checkpoint
from triptych.services.router.api_types import ChatTurn
from triptych.services.router.prompt import Prompt, PromptBuilder, expand
from triptych.services.router.spellings import Spellings
from triptych.shared.checkpoint import Checkpoint, open_checkpoint
from triptych.shared.errors import BadRequest, TriptychError

# hypothesis also tries strings that it finds in the source: those that spell special tokens have tests of their own
texts = st.text(max_size=30).filter(lambda text: not any(token in text for token in SPECIAL)) | st.sampled_from(
    ["\n\nlead", " ", "trail \n", "e\u0301", "你好 🎉", "a\r\nb", "", "<", "{{ 1 }}", "| im_end"]
)
spellings = st.sampled_from(SPECIAL)
contents = texts | st.lists(texts | st.none(), max_size=4).map(tuple)
roles = st.sampled_from(["system", "user", "assistant", "tool"])
turns = st.lists(st.builds(ChatTurn, roles, contents), min_size=1, max_size=4)


def built(builder: PromptBuilder, *said: ChatTurn) -> Prompt:
    num_images = sum(turn.content.count(None) for turn in said if isinstance(turn.content, tuple))
    return builder.build(said, num_images)


def user(*parts: str | None) -> ChatTurn:
    return ChatTurn("user", parts)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    return PromptBuilder(open_checkpoint(str(write_toy_checkpoint(tmp_path_factory.mktemp("toy")))))


def decoded(builder: PromptBuilder, prompt: Prompt) -> str:
    return str(builder.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False))


def special_in(builder: PromptBuilder, prompt: Prompt) -> list[str]:
    ids = {builder.tokenizer.token_to_id(text): text for text in SPECIAL}
    return [ids[id_] for id_ in prompt.token_ids if id_ in ids]


@pytest.fixture(scope="module")
def real(tiny_checkpoint: Path) -> tuple[PromptBuilder, Any]:
    """The project's own checkpoint, and transformers' tokenizer of it."""
    from transformers import AutoTokenizer  # imports torch: only here

    checkpoint: Checkpoint = open_checkpoint(str(tiny_checkpoint))
    return PromptBuilder(checkpoint), AutoTokenizer.from_pretrained(str(tiny_checkpoint))


@given(said=turns)
def test_token_ids_are_those_of_transformers(real: tuple[PromptBuilder, Any], said: list[ChatTurn]) -> None:
    builder, tokenizer = real
    messages = [
        {
            "role": turn.role,
            "content": turn.content
            if isinstance(turn.content, str)
            else [{"type": "image"} if part is None else {"type": "text", "text": part} for part in turn.content],
        }
        for turn in said
    ]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    prompt = built(builder, *said)
    assert list(prompt.token_ids) == list(expected)
    assert len(prompt.placeholder_at) == sum(turn.content.count(None) for turn in said if isinstance(turn.content, tuple))


@given(before=texts, spelled=st.lists(spellings, min_size=1, max_size=3), after=texts, as_parts=st.booleans())
def test_text_that_spells_special_tokens_stays_text(
    builder: PromptBuilder, before: str, spelled: list[str], after: str, as_parts: bool
) -> None:
    text = before + "".join(spelled) + after
    prompt = built(builder, user(text) if as_parts else ChatTurn("user", text))
    assert special_in(builder, prompt) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert decoded(builder, prompt) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert not prompt.placeholder_at


@given(spelled=spellings, data=st.data())
def test_parts_that_only_spell_one_together_stay_text(builder: PromptBuilder, spelled: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(spelled) - 1))
    prompt = built(builder, user("a", spelled[:cut], spelled[cut:], None))
    assert special_in(builder, prompt).count("<|image_pad|>") == 1
    assert decoded(builder, prompt).count(f"a{spelled}<|vision_start|>") == 1
    assert len(special_in(builder, prompt)) == 6


def test_a_fake_picture_beside_a_real_one(builder: PromptBuilder) -> None:
    prompt = built(builder, user("<|vision_start|><|image_pad|><|vision_end|>", None))
    [at] = prompt.placeholder_at
    assert decoded(builder, Prompt(prompt.token_ids[at - 1 : at + 2], ())) == "<|vision_start|><|image_pad|><|vision_end|>"
    after = decoded(builder, Prompt(prompt.token_ids[at:], ()))
    assert after == "<|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n", "the real one comes after the text"


def test_images_that_the_template_does_not_place(tmp_path: Path) -> None:
    blind = TEMPLATE.replace("{% if c['type'] == 'image' %}", "{% if c['type'] == 'image' and m['role'] == 'tool' %}")
    blind = blind.replace("{{ c['text'] }}", "{{ c.get('text', '') }}")
    builder = PromptBuilder(open_checkpoint(str(write_toy_checkpoint(tmp_path / "toy", template=blind))))
    with pytest.raises(BadRequest) as caught:
        built(builder, user("x", None))
    assert "0 of 1 images" in caught.value.message


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[0]['content'] + 5 }}"])
def test_a_template_that_refuses(tmp_path: Path, template: str) -> None:
    builder = PromptBuilder(open_checkpoint(str(write_toy_checkpoint(tmp_path / "toy", template=template))))
    with pytest.raises(TriptychError) as caught:
        built(builder, ChatTurn("user", "x"))
    assert (caught.value.status, caught.value.message) == (400, "the model's chat template does not take these messages")


def test_a_text_is_not_a_template(builder: PromptBuilder) -> None:
    text = "{{ messages }}{% for a in b %}"
    assert text in decoded(builder, built(builder, ChatTurn("user", text)))


def test_other_places_of_the_template(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "toy")
    expected = built(PromptBuilder(open_checkpoint(str(folder))), user("x", None))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(BadRequest):
        PromptBuilder(open_checkpoint(str(folder)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert built(PromptBuilder(open_checkpoint(str(folder))), user("x", None)) == expected


def test_a_mark_that_a_template_has_cut_stays_text() -> None:
    spellings = Spellings(re.compile("<x>"), split_parts=False)
    marked = str(spellings.marked(ChatTurn("user", "y<x>z<x>")).content)
    assert spellings.split(marked) == ["y", "<x>", "z", "<x>", ""]
    assert spellings.split(marked[:-1]) == ["y", "<x>", marked[marked.index("z") : -1]]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=6), st.integers(0, 4))
def test_expand(images: list[tuple[int, int]], num_after: int) -> None:
    pad, text = 9, 1
    token_ids = array("I")
    at = []
    for num_text, _ in images:
        token_ids.extend([text] * num_text)
        at.append(len(token_ids))
        token_ids.append(pad)
    token_ids.extend([text] * num_after)
    expanded = expand(Prompt(token_ids, tuple(at)), [count for _, count in images])
    naive: list[int] = []
    for num_text, count in images:
        naive += [text] * num_text + [pad] * count
    naive += [text] * num_after
    assert list(expanded.token_ids) == naive
    for offset, (_, count) in zip(expanded.offsets, images, strict=True):
        assert naive[offset : offset + count] == [pad] * count
    assert array("I", expanded.to_bytes()) == expanded.token_ids
    assert len(expanded.to_bytes()) == 4 * len(naive)


def test_a_prompt_is_made_in_linear_time(builder: PromptBuilder) -> None:
    """Many spellings and many parts: nothing is replaced over and over in one string."""
    text = "<|image_pad|>" * 20_000
    prompt = built(builder, user(*["a"] * 2000, text))
    assert not prompt.placeholder_at


def test_plain_prompts(builder: PromptBuilder) -> None:
    """Raw text may spell special tokens: who asks for it makes the template himself."""
    prompt = builder.plain("<|im_start|>user\nhi<|im_end|>", True)
    assert special_in(builder, prompt) == ["<|im_start|>", "<|im_end|>"]
    assert builder.plain(list(prompt.token_ids), True) == prompt
    for bad in ("", [], [10_000_000], "a<|image_pad|>"):
        with pytest.raises(BadRequest) as caught:
            builder.plain(bad, True)
        assert caught.value.param == "prompt"


def test_other_threads_run_while_a_long_text_is_tokenized(builder: PromptBuilder) -> None:
    num_ticks, is_over = 0, threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_over.wait(0.001):
            num_ticks += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        before = num_ticks
        builder.encode("some words, " * 100_000, add_special_tokens=False)
        during = num_ticks - before
    finally:
        is_over.set()
        ticking.join()
    assert during > 10  # with the interpreter lock held: one or two
