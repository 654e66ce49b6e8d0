"""The truth that the cluster is measured against: transformers' own `generate`, greedy, fp32, one request at a time.

`Reference.answer` gives the tokens and, for each, the gap between its logit and the runner-up's. `judge` compares a
cluster's answer: a first difference is excused only where that gap is below TIE_GAP (float ties, docs/decisions.md).
"""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, GenerationConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from support.cases import Case
from support.client import Answer
from triptych.shared.checkpoint import open_checkpoint

TIE_GAP = 1e-4  # design.md: results depend a little on batch shape, 1e-7 to 1e-6 relative


@dataclass(frozen=True, slots=True)
class Expected:
    """token_ids: the output without the stop token; gaps: one more than token_ids when it stopped by itself."""

    token_ids: list[int]
    gaps: list[float]
    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_image_tokens: int


class Reference:
    """Loads on first use. Answers are kept in `cache_dir`, by checkpoint revision and request: reruns are quick."""

    def __init__(self, model_dir: Path, cache_dir: Path) -> None:
        self._model_dir = model_dir
        self._checkpoint = open_checkpoint(str(model_dir))
        self._cache_dir = cache_dir / self._checkpoint.revision
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        self.text_config: dict[str, Any] = self._checkpoint.config.get("text_config", self._checkpoint.config)
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._model: Any = None

    def answer(self, case: Case) -> Expected:
        cached = self._cache_dir / f"{case.key()}.json"
        if cached.exists():
            return Expected(**json.loads(cached.read_text()))
        expected = self._generate(case)
        partial = cached.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(expected)))
        partial.replace(cached)
        return expected

    def inputs(self, case: Case) -> dict[str, torch.Tensor]:
        """What transformers' processor makes of a request. Our own few lines, since it needs torchvision for videos."""
        messages = [
            {
                "role": message.role,
                "content": parts
                if isinstance(parts := message.content(), str)
                else [part if part["type"] == "text" else {"type": "image"} for part in parts],
            }
            for message in case.messages
        ]
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images = [Image.open(io.BytesIO(picture.data)).convert("RGB") for picture in case.pictures()]
        extra: dict[str, torch.Tensor] = {}
        placeholder = self.tokenizer.convert_ids_to_tokens(self._checkpoint.image_token_id)
        if images:
            processor = Qwen2VLImageProcessorPil.from_pretrained(self._model_dir)
            extra = dict(processor(images=images, return_tensors="pt"))
            counts = (extra["image_grid_thw"].prod(-1) // processor.merge_size**2).tolist()
            head, *rest = prompt.split(placeholder)
            assert len(rest) == len(counts), "the chat template has another number of placeholders than pictures"
            prompt = head + "".join(placeholder * n + after for n, after in zip(counts, rest, strict=True))
        input_ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        types = (input_ids == self._checkpoint.image_token_id).int()
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "mm_token_type_ids": types, **extra}

    @torch.inference_mode()
    def _generate(self, case: Case) -> Expected:
        inputs = self.inputs(case)
        eos = list(self._checkpoint.eos_token_ids)
        config = GenerationConfig(
            max_new_tokens=case.max_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos[0],
            return_dict_in_generate=True,
            output_logits=True,
        )
        out = self._load().generate(**inputs, generation_config=config)
        num_prompt_tokens = inputs["input_ids"].shape[1]
        token_ids = out.sequences[0, num_prompt_tokens:].tolist()
        top2 = [step[0].topk(2).values for step in out.logits]
        stopped = token_ids[-1] in eos
        shown = token_ids[:-1] if stopped else token_ids
        return Expected(
            token_ids=shown,
            gaps=[float(top[0] - top[1]) for top in top2],
            text=self.tokenizer.decode(shown, skip_special_tokens=True),
            finish_reason="stop" if stopped else "length",
            num_prompt_tokens=num_prompt_tokens,
            num_image_tokens=int(inputs["mm_token_type_ids"].sum()),
        )

    @torch.inference_mode()
    def logprobs(self, case: Case, token_ids: list[int]) -> torch.Tensor:
        """Of every token of the vocabulary at the place of each of these output tokens: [len(token_ids), vocabulary]."""
        inputs = self.inputs(case)
        num_prompt_tokens = inputs["input_ids"].shape[1]
        said = torch.tensor([token_ids])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], said], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(said).int()], dim=1)
        logits = self._load()(**inputs).logits[0, num_prompt_tokens - 1 : -1]
        return torch.log_softmax(logits.float(), dim=-1)

    def _load(self) -> Any:
        if self._model is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # transformers' own deprecations are not ours to fail on
                model = Qwen2_5_VLForConditionalGeneration.from_pretrained(self._model_dir, dtype=torch.float32)
            self._model = model.eval()
        return self._model

    def judge(self, case: Case, answer: Answer) -> str:
        """ "equal", "excused: ..." or "wrong: ..."."""
        expected = self.answer(case)
        if answer.error is not None or answer.status != 200:
            return f"wrong: status {answer.status}, error {answer.error}"
        usage = answer.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        counted = (usage.get("prompt_tokens"), details.get("image_tokens"))
        if counted != (expected.num_prompt_tokens, expected.num_image_tokens):
            return f"wrong: (prompt, image) tokens {counted}, not {(expected.num_prompt_tokens, expected.num_image_tokens)}"
        if answer.text != expected.text:
            return self._judge_difference(expected, answer.text)
        output = (answer.finish_reason, usage.get("completion_tokens"))
        if output != (expected.finish_reason, len(expected.token_ids)):
            # a stop token lost or won in a tie changes nothing in the text
            tie = len(expected.gaps) and expected.gaps[-1] < TIE_GAP
            told = f"(finish, tokens) {output}, not {(expected.finish_reason, len(expected.token_ids))}"
            return f"excused: {told}" if tie else f"wrong: {told}"
        return "equal"

    def _judge_difference(self, expected: Expected, text: str) -> str:
        """The first differing token is looked for in the text: the API has no token ids. Tokens that end inside a
        character decode to U+FFFD, so the place is known as a range of steps; a tie anywhere in it excuses."""
        first, last = 0, 0
        for count in range(1, len(expected.token_ids) + 1):
            prefix = self.tokenizer.decode(expected.token_ids[:count], skip_special_tokens=True)
            if text.startswith(prefix):
                first = last = count
            elif not text.startswith(prefix.rstrip("\ufffd")):
                last = count - 1
                break
        steps = range(first, min(max(first, last) + 1, len(expected.gaps)))
        gaps = [expected.gaps[step] for step in steps]
        told = f"differs at token {first}..{max(first, last)} of {len(expected.token_ids)}, top-2 gaps {gaps}"
        if gaps and min(gaps) < TIE_GAP:
            return f"excused: {told}"
        return f"wrong: {told}: got {text!r}, expected {expected.text!r}"
