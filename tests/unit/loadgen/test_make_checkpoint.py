"""The checkpoints that the project makes: repeatable, loadable, with a tokenizer and template that behave like Qwen's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from triptych.loadgen.checkpoint import SHAPES, SPECIAL_TOKENS, make_checkpoint
from triptych.loadgen.cli import main
from triptych.shared.checkpoint import open_checkpoint


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_seed_gives_the_same_files_and_another_seed_others(tiny_checkpoint: Path, tmp_path: Path) -> None:
    again = make_checkpoint("tiny", tmp_path / "again")
    for file in sorted(tiny_checkpoint.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    first, other = weights(tiny_checkpoint), weights(make_checkpoint("tiny", tmp_path / "other", seed=1))
    assert first.keys() == other.keys()
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert open_checkpoint(str(again)).revision == open_checkpoint(str(tiny_checkpoint)).revision


def test_it_opens_as_a_checkpoint_with_random_weights(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint))
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    assert checkpoint.random_weights
    assert checkpoint.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert checkpoint.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert 0.8e6 < sum(tensor.numel() for tensor in weights(tiny_checkpoint).values()) < 1.3e6


@pytest.mark.parametrize("text", ["Hello, world!", "  two  spaces\n\ttab", "Äpfel 图片 🐈 x=3.14", "bababa the 007", ""])
def test_text_survives_the_tokenizer(tiny_checkpoint: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert all(token_id < SHAPES["tiny"].vocab_size - len(SPECIAL_TOKENS) for token_id in ids)


def test_every_token_shows_as_something(tiny_checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    assert len(tokenizer) == SHAPES["tiny"].vocab_size
    assert all(tokenizer.decode([token_id]) for token_id in range(len(tokenizer)))


def test_the_chat_template_takes_strings_and_parts(tiny_checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": " b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\na {image} b<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        f"<|im_start|>user\n{image}<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert (
        tokenizer.apply_chat_template(own, tokenize=False) == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
    )


def test_the_command_writes_one_and_refuses_unknown_kinds(tmp_path: Path) -> None:
    made = CliRunner().invoke(main, ["make-checkpoint", "tiny", str(tmp_path / "made"), "--seed", "3"])
    assert made.exit_code == 0, made.output
    assert json.loads((tmp_path / "made" / "config.json").read_text())["triptych_random_weights"] is True
    refused = CliRunner().invoke(main, ["make-checkpoint", "huge", str(tmp_path / "huge")])
    assert refused.exit_code == 2
    assert not (tmp_path / "huge").exists()


def test_the_command_writes_over_no_file_and_into_no_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    for out in (tmp_path, tmp_path / "note"):
        refused = CliRunner().invoke(main, ["make-checkpoint", "tiny", str(out)])
        assert refused.exit_code == 2
        assert "is no checkpoint" in refused.output.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_the_command_line_imports_without_torch() -> None:
    code = "import sys, triptych.loadgen.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
