"""What prompts cost in tokens at a target: asked of it before a replay, with a few requests of one token's answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from triptych.loadgen.replay.pictures import Picture

NUM_WORDS_FEW, NUM_WORDS_MANY = 8, 264  # chosen: the slope over 256 words
ASSUMED_PER_WORD = 4 / 3  # where a target reports no usage: OpenAI's rule of thumb, 100 tokens are about 75 words

CountPrompt = Callable[[int, Sequence[Picture]], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """per_request: of the chat template. max_model_len: as the target says. is_measured: not assumed."""

    per_word: float = ASSUMED_PER_WORD
    per_request: float = 0.0
    per_picture: float = 0.0
    per_pixel: float = 0.0
    max_model_len: int | None = None
    is_measured: bool = False

    def of_picture(self, num_pixels: int) -> float:
        return self.per_picture + self.per_pixel * num_pixels

    def pixels_of(self, num_tokens: float) -> float | None:
        """Of a picture of so many tokens; None where they don't depend on its size."""
        return max(1.0, (num_tokens - self.per_picture) / self.per_pixel) if self.per_pixel > 0 else None


async def measure_token_costs(count_prompt: CountPrompt, pictures: Sequence[Picture], max_model_len: int | None) -> TokenCosts:
    """Straight lines through what count_prompt says of prompts of so many words and these pictures.

    Args:
        pictures: a small and a large one, or none.
        count_prompt: gives 0 where the target does not tell.
    """
    few, many = await count_prompt(NUM_WORDS_FEW, ()), await count_prompt(NUM_WORDS_MANY, ())
    if not 0 < few < many:
        return TokenCosts(max_model_len=max_model_len)
    per_word = (many - few) / (NUM_WORDS_MANY - NUM_WORDS_FEW)
    per_picture = per_pixel = 0.0
    if pictures:
        small, large = (picture.width * picture.height for picture in pictures)
        of_small, of_large = [await count_prompt(NUM_WORDS_FEW, [picture]) - few for picture in pictures]
        per_pixel = (of_large - of_small) / (large - small) if large > small else 0.0
        per_picture = of_small - per_pixel * small
    return TokenCosts(per_word, few - per_word * NUM_WORDS_FEW, per_picture, per_pixel, max_model_len, is_measured=True)
