"""A small byte-level BPE tokenizer, trained on the world's own questions and answers, and the chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from triptych.loadgen.checkpoint import SPECIAL_TOKENS

IMAGE_TOKEN = "<|image_pad|>"
END_TOKEN = "<|im_end|>"
SYSTEM_PROMPT = "You are a helpful assistant."

# Qwen2.5-VL's own template can number the pictures (`add_vision_id`); here it does unless told otherwise.
CHAT_TEMPLATE = """\
{%- set picture = namespace(number=0) -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or part['type'] == 'image_url' or 'image' in part or 'image_url' in part -%}
{%- set picture.number = picture.number + 1 -%}
{%- if add_vision_id is not defined or add_vision_id -%}
{{ 'Picture ' + picture.number | string + ': ' }}
{%- endif -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
_FRAME = ("user\n", "assistant\n", f"system\n{SYSTEM_PROMPT}", "Picture 1: ")
_FRAME_COUNT = 3000  # chosen: as common as the commonest questions, so that each word of the template is one token


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Digits stand alone, as in Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_FRAME * _FRAME_COUNT, *texts], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    untyped: Any = transformers.PreTrainedTokenizerFast  # most of transformers has no annotations
    fast = untyped(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
