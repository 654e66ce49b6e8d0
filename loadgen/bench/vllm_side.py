"""The vLLM side of bench engine: a script for vLLM's own interpreter, which needs nothing of this project.

`python vllm_side.py FOLDER MAX_MODEL_LEN MAX_NUM_SEQS`: a JSON line {"version"} when the model is loaded; then one line with
"prefill_s" and "decode_s" for each line of a Case's fields, "seed" and "num_token_ids" on stdin, until that ends.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any


def answer(line: dict[str, Any]) -> None:
    """Only answers go to the real stdout: what vLLM prints goes to stderr."""
    ANSWERS.write(json.dumps(line) + "\n")
    ANSWERS.flush()


def main() -> None:
    """Load, then measure as asked. Prefill is timed by itself, since vLLM's steps mix prompts with decoding."""
    import vllm  # type: ignore[import-not-found]  # here, when stdout is safe

    llm = vllm.LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=int(sys.argv[2]),
        max_num_seqs=int(sys.argv[3]),
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 0, "video": 0},
    )

    def timed(case: dict[str, int], rng: random.Random, num_output_tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [rng.randrange(case["num_token_ids"]) for _ in range(case["num_prompt_tokens"])]}
            for _ in range(case["batch_size"])
        ]
        sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_output_tokens, detokenize=False)
        began_s = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began_s

    answer({"version": vllm.__version__})
    for line in sys.stdin:
        case = json.loads(line)
        rng = random.Random(case["seed"])
        prefill_s = timed(case, rng, 1)
        answer({"prefill_s": prefill_s, "decode_s": timed(case, rng, case["num_output_tokens"]) - prefill_s})


if __name__ == "__main__":
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
