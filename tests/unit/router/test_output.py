"""Outputs: stop strings are found wherever tokens end and never leak, probabilities stay in step with the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from support.fake_stages import SPECIAL, write_toy_checkpoint
from triptych.services.router.output import Output, Piece
from triptych.services.router.stop_strings import StopStrings
from triptych.services.router.token_streams import Tokens
from triptych.services.router.token_texts import TokenTexts
from triptych.shared.sampling_params import TokenLogprobs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_toy_checkpoint(tmp_path_factory.mktemp("toy"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def run(output: Output, token_ids: list[int], step: int) -> list[Piece]:
    """Until it is over."""
    pieces: list[Piece] = []
    for i in range(0, len(token_ids), step):
        part = tuple(token_ids[i : i + step])
        pieces.append(output.push(Tokens(part, logprobs=tuple(TokenLogprobs(-float(id_)) for id_ in part))))
        if pieces[-1].finish_reason is not None:
            return pieces
    return [*pieces, output.push(Tokens((), "length"))]


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
)
def test_text_up_to_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    """Whatever comes out at any moment is a beginning of the right answer, and little is held back."""
    found, out, whole = StopStrings(stops), "", "".join(pieces)
    seen = ""
    for piece in pieces:
        out += found.push(piece)
        seen += piece
        assert seen.startswith(out)
        assert not any(stop in out for stop in stops)
        if found.is_met:
            break
        assert len(seen) - len(out) < max((len(stop) for stop in stops), default=1)
    else:
        assert not any(stop in whole for stop in stops)
        assert out + found.finish() == whole
        return
    ends = [seen.find(stop) for stop in stops if stop in seen]
    assert out == seen[: min(ends)]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", "END", "one "),
        ("one EN two END", "END", "one EN two "),
        ("a\n\nb", "\n\n", "a"),
        ("grün 🎉 rot", "🎉", "grün "),
        ("ENEND", "END", "EN"),
        ("no end", "END", "no end"),
        ("almost EN", "END", "almost EN"),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_stop_strings_across_tokens(tokenizer: Tokenizer, text: str, stop: str, expected: str, step: int) -> None:
    """Usage does not depend on how many tokens came at once."""
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    output = Output(0, TokenTexts(tokenizer), (stop,))
    pieces = run(output, token_ids, step)
    assert text_of(pieces) == expected
    assert pieces[-1].finish_reason == ("stop" if stop in text else "length")
    count = output.num_tokens
    assert tokenizer.decode(token_ids[:count]).startswith(text[: text.find(stop) + len(stop)] if stop in text else text)
    assert count == len(token_ids) or stop not in tokenizer.decode(token_ids[: count - 1])
    assert [token.token_id for piece in pieces for token in piece.tokens] == token_ids[:count]


def test_stop_strings_do_not_count_within_min_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("xQxQxQ", add_special_tokens=False).ids
    assert len(token_ids) == 6
    output = Output(0, TokenTexts(tokenizer), ("Q",), min_tokens=3)
    assert (text_of(run(output, token_ids, 1)), output.num_tokens) == ("xQx", 4)


@given(text=st.text(max_size=30).filter(lambda text: not any(token in text for token in SPECIAL)), step=st.integers(1, 5))
def test_tokens_and_their_bytes(tokenizer: Tokenizer, text: str, step: int) -> None:
    """Each token is told once, with its own probability and bytes that join to the text, even where it cuts a character."""
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = run(Output(0, TokenTexts(tokenizer)), token_ids, step)
    told = [token for piece in pieces for token in piece.tokens]
    assert [token.token_id for token in told] == token_ids
    assert [token.logprobs.logprob for token in told] == [-float(id_) for id_ in token_ids]
    texts = TokenTexts(tokenizer)
    assert b"".join(texts.bytes_of(id_) for id_ in token_ids).decode() == text
    for piece in pieces:
        assert piece.tokens or not piece.text, "text without its tokens"


def test_bytes_of_special_and_unknown_tokens(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    assert texts.bytes_of(tokenizer.token_to_id("<|im_end|>")) == b"<|im_end|>"
    assert texts.bytes_of(1_000_000) == b""


def test_bytes_of_sentencepiece_tokens() -> None:
    vocabulary = {"\u2581hi": 0, "<0xE2>": 1, "x": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert [TokenTexts(tokenizer).bytes_of(id_) for id_ in range(3)] == [b" hi", b"\xe2", b"x"]
