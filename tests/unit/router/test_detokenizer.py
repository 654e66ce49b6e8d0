"""Text comes out whole: pieces join to the decoded output, no character is cut, and little is held back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from support.fake_stages import SPECIAL, write_toy_checkpoint
from triptych.services.router.detokenizer import Detokenizer
from triptych.services.router.token_texts import TokenTexts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_toy_checkpoint(tmp_path_factory.mktemp("toy"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def pieces_of(detokenizer: Detokenizer, token_ids: list[int], step: int) -> list[str]:
    pieces = [detokenizer.push(token_ids[i : i + step]) for i in range(0, len(token_ids), step)]
    return [*pieces, detokenizer.finish()]


@pytest.fixture(scope="module", params=[True, False], ids=["any tokenizer", "byte-level"])
def needs_context(request: pytest.FixtureRequest) -> bool:
    """Byte-level ones are right either way."""
    return bool(request.param)


# hypothesis also tries strings that it finds in the source, and a special token is no text
plain_text = st.text(max_size=40).filter(lambda text: not any(token in text for token in SPECIAL))


@given(text=plain_text, step=st.integers(1, 4))
def test_pieces_of_text_join_and_no_character_is_cut(tokenizer: Tokenizer, needs_context: bool, text: str, step: int) -> None:
    pieces = pieces_of(Detokenizer(tokenizer, needs_context), tokenizer.encode(text, add_special_tokens=False).ids, step)
    assert "".join(pieces) == text
    for piece in pieces:
        assert piece.count("\ufffd") <= text.count("\ufffd")


@given(data=st.data(), step=st.integers(1, 4))
def test_pieces_of_any_tokens_join_to_what_they_decode_to(
    tokenizer: Tokenizer, needs_context: bool, data: st.DataObject, step: int
) -> None:
    """Random models make bytes that are no text at all."""
    broken = [id_ for id_ in range(tokenizer.get_vocab_size()) if tokenizer.decode([id_]) == "\ufffd"]
    token_id = st.sampled_from(broken) | st.integers(0, tokenizer.get_vocab_size() - 1)
    token_ids = data.draw(st.lists(token_id, max_size=60))
    pieces = pieces_of(Detokenizer(tokenizer, needs_context), token_ids, step)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


def test_an_unfinished_character_waits_for_its_rest(tokenizer: Tokenizer, needs_context: bool) -> None:
    first, *rest = tokenizer.encode("🎉", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer, needs_context)
    assert detokenizer.push([first]) == ""
    assert detokenizer.push(rest) == "🎉"


def test_endless_broken_bytes_do_not_pile_up(tokenizer: Tokenizer, needs_context: bool) -> None:
    [broken] = [id_ for id_ in range(300) if tokenizer.decode([id_]) == "\ufffd"][:1]
    detokenizer = Detokenizer(tokenizer, needs_context)
    told = sum(len(detokenizer.push([broken])) for _ in range(200))
    assert told >= 195


def test_special_tokens_are_not_text(tokenizer: Tokenizer, needs_context: bool) -> None:
    special = [tokenizer.token_to_id(text) for text in SPECIAL]
    ids = tokenizer.encode("ab", add_special_tokens=False).ids
    assert "".join(pieces_of(Detokenizer(tokenizer, needs_context), special * 50 + ids + special, 1)) == "ab"


def test_which_tokenizers_need_context(tokenizer: Tokenizer) -> None:
    """Where a sentence begins, SentencePiece's first space is none."""
    assert not TokenTexts(tokenizer).detokenizer().needs_context
    words = Tokenizer(models.BPE(vocab={"\u2581a": 0}, merges=[]))
    assert TokenTexts(words).detokenizer().needs_context
    words.decoder = decoders.Metaspace()
    assert pieces_of(TokenTexts(words).detokenizer(), [0, 0], 1) == ["a", " a", ""]
