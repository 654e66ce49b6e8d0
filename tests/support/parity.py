"""Sends many cases to a cluster, compares every answer with the reference, and tells about each that differs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from support.cases import Case
from support.client import Answer, ask_all
from support.reference import Reference

MAX_EXCUSED_SHARE = 0.005  # the acceptance bound; one is always allowed, as 0.5 % of 60 requests is none


async def check_parity(url: str, cases: Sequence[Case], reference: Reference, concurrency: int = 16) -> list[Answer]:
    """All answers, when each equals the reference's, but for excused float ties: printed, and at most 0.5 %."""
    for case in cases:
        reference.answer(case)  # before the cluster works: both on the same cores would only be slower
    begin_s = time.monotonic()
    answers = await ask_all(url, cases, concurrency)
    took_s = time.monotonic() - begin_s
    judge_all(cases, answers, reference)
    print(f"{len(cases)} requests at concurrency {concurrency} in {took_s:.1f} s")
    return answers


def judge_all(cases: Sequence[Case], answers: Sequence[Answer], reference: Reference) -> None:
    verdicts = [reference.judge(case, answer) for case, answer in zip(cases, answers, strict=True)]
    excused = [f"request {index}: {verdict}" for index, verdict in enumerate(verdicts) if verdict.startswith("excused")]
    wrong = [
        f"request {index} ({len(cases[index].pictures())} pictures): {verdict[:600]}"
        for index, verdict in enumerate(verdicts)
        if verdict.startswith("wrong")
    ]
    for line in excused:
        print(line)
    assert not wrong, f"{len(wrong)} of {len(cases)} answers are wrong:\n" + "\n".join(wrong[:10])
    assert len(excused) <= max(1, MAX_EXCUSED_SHARE * len(cases)), "too many excused differences:\n" + "\n".join(excused)
