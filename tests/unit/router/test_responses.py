"""Answers with many log probabilities: of little memory."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from triptych.services.router.output import OutputToken, Piece
from triptych.services.router.responses import Bodies, ChatBodies, CompletionBodies
from triptych.services.router.token_texts import TokenTexts
from triptych.shared.sampling_params import TokenLogprobs

NUM_TOKENS, NUM_TOP = 500, 20
MAX_MEMORY = 6.0  # in answers' own sizes: pieces, and their join twice over; as objects it was 30


@pytest.mark.parametrize("kind", [ChatBodies, CompletionBodies])
def test_log_probabilities_take_no_more_memory_than_a_few_answers(kind: type[Bodies]) -> None:
    texts = TokenTexts(Tokenizer(WordLevel({f"w{i}": i for i in range(NUM_TOP)}, unk_token="w0")))
    logprobs = TokenLogprobs(-0.25, tuple((i, -0.5 * i) for i in range(NUM_TOP)))
    piece = Piece(0, "text", "stop", tuple(OutputToken(i % NUM_TOP, logprobs) for i in range(NUM_TOKENS)))
    bodies = kind("id", 0, "model", texts, False)
    bodies.whole([piece], {}, {})  # what is kept for all answers is there now
    tracemalloc.start()
    try:
        answer = bodies.whole([piece], {"prompt_tokens": 1}, {"triptych": {}})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MAX_MEMORY * len(answer)
    data = json.loads(answer)
    assert data["usage"] == {"prompt_tokens": 1}
    assert data["triptych"] == {}
    told = data["choices"][0]["logprobs"]
    assert len(told["content"] if kind is ChatBodies else told["tokens"]) == NUM_TOKENS
