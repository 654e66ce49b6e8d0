"""Makes the tokenizer of emulated models: `python deploy/emulated/make_tokenizer.py`, which writes shared/emulated_model/.

A small byte-level BPE tokenizer of ordinary English: their texts are noise, but how many tokens a prompt has should be about
what a real model's tokenizer makes of it. Trained on the help topics that come with CPython 3.11 (`pydoc_data`).
"""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "emulated_model"
VOCAB_SIZE = 8192  # chosen: the file stays small. 3.2 characters of English to a token; Qwen2.5-VL's 152,064 make about 4.4
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make() -> None:
    """Digits stand alone, as in Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = VOCAB_SIZE - len(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    words = ["user\n", "assistant\n", "system\n"] * 1000
    tokenizer.train_from_iterator([*topics.values(), *words], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    FOLDER.mkdir(exist_ok=True)
    tokenizer.save(str(FOLDER / "tokenizer.json"), pretty=False)
    (FOLDER / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}) + "\n")
    (FOLDER / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    make()
