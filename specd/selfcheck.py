"""Before the first user: a token goes through draft and verify, and the drafter shows what it is worth."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable

from specd.errors import AbortedError, EngineError, RequestError
from specd.log import get_logger
from specd.request import (
    FinishReason,
    Request,
    SamplingParams,
    SequenceDelta,
    SequenceStats,
    SpeculationParams,
)
from specd.status import EngineInfo
from specd.text import Tokenizer

Submit = Callable[[Request], AsyncIterator[SequenceDelta]]

log = get_logger(__name__)

_TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over"
_PROMPTS = (
    _TEXT,
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "The capital of France is Paris. The capital of Italy is",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name":',
)
_TOKENS = 32
_RARELY = 0.05  # of the drafts kept; fewer cost more than they save with any drafter that computes
_ENOUGH = 32  # drafts that a verdict needs
_PINNED = 4  # drafts a step of the self-test
_DEPTH = 2  # drafts a step: of deeper ones hardly any is kept whatever the drafter is worth


async def warm_up(submit: Submit, info: EngineInfo, tokenizer: Tokenizer) -> None:
    """Generates a few tokens greedily, so that every stage has run. Raises EngineError when they do not come."""
    last = await _generate(submit, info, tokenizer, 4)
    if last.stats is None or last.error is not None:
        raise EngineError(f"the first tokens could not be computed: {last.error or last.finish_reason}")
    if info.max_draft and info.max_len > 8 and last.stats.num_draft_tokens == 0:
        raise EngineError(f"the drafter {info.drafter} proposed nothing for the first tokens")


async def self_check(submit: Submit, info: EngineInfo, tokenizer: Tokenizer) -> None:
    """Reports what the drafter's guesses are worth: acceptance over 32 tokens. Warns when it is next to nothing."""
    stats = (await _generate(submit, info, tokenizer, _TOKENS)).stats
    assert stats is not None
    log.info(
        "drafter_checked",
        drafter=info.drafter,
        tokens=stats.completion_tokens,
        drafted=stats.num_draft_tokens,
        accepted=stats.num_accepted_tokens,
    )
    if stats.num_draft_tokens >= _ENOUGH and stats.num_accepted_tokens < _RARELY * stats.num_draft_tokens:
        log.warning(
            "drafter_rarely_right",
            drafter=info.drafter,
            drafted=stats.num_draft_tokens,
            accepted=stats.num_accepted_tokens,
            advice="another speculation.draft, or none, is likely to be faster",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, greedily, with drafts and without. A split where two tokens are nearly tied is rounding, no more."""

    prompt: int  # which of the built-in ones
    identical: bool
    tokens: int
    split: int | None  # first token that differs
    drafted: int
    accepted: int
    speculative_s: float
    plain_s: float


async def compare_with_plain(submit: Submit, info: EngineInfo, tokenizer: Tokenizer) -> list[Comparison]:
    """The built-in prompts beside whatever else runs: drafts are made whatever the length policy says of others.

    Raises what submit raises; RequestError without a drafter, EngineError when a prompt fails, or when a drafter that
    should have made no draft at all, since nothing is proved then.
    """
    if not info.max_draft:
        raise RequestError("selftest: nothing drafts here (speculation.draft)", code="no_drafter")
    found = []
    pinned = SpeculationParams(max_draft=min(_PINNED, info.max_draft), pinned=True)
    for number, text in enumerate(_PROMPTS):
        prompt = (tokenizer.encode(text) or [0])[: max(1, info.max_len // 2)]
        drafted = await _greedy(submit, info, prompt, pinned)
        plain = await _greedy(submit, info, prompt, SpeculationParams(mode="off"))
        split = next((i for i, (a, b) in enumerate(zip(drafted[0], plain[0], strict=False)) if a != b), None)
        stats = drafted[1]
        comparison = Comparison(
            prompt=number,
            identical=drafted[0] == plain[0],
            tokens=len(plain[0]),
            split=split,
            drafted=stats.num_draft_tokens,
            accepted=stats.num_accepted_tokens,
            speculative_s=stats.total_s,
            plain_s=plain[1].total_s,
        )
        log.info("selftest_compared", **dataclasses.asdict(comparison))
        found.append(comparison)
    if not any(comparison.drafted for comparison in found):
        raise EngineError(f"the drafter {info.drafter} made no draft for any prompt: nothing was proved; see the log")
    return found


async def _greedy(
    submit: Submit, info: EngineInfo, prompt: list[int], speculation: SpeculationParams
) -> tuple[list[int], SequenceStats]:
    """(tokens, stats) of one prompt of its own prefix cache: both ways compute everything."""
    name = f"specd-selftest-{secrets.token_hex(8)}"
    params = SamplingParams(
        max_tokens=min(_TOKENS, info.max_len - len(prompt)), seed=0, temperature=0.0, ignore_eos=True
    )
    request = Request(name, tuple(prompt), params, speculation, cache_salt=name.encode(), arrival_s=time.monotonic())
    deltas = [delta async for delta in submit(request)]
    last = deltas[-1]
    if isinstance(last.error, AbortedError):
        raise last.error  # somebody ended it: it says nothing of the engine
    if last.stats is None or last.finish_reason is not FinishReason.LENGTH:
        raise EngineError(f"a prompt of the self-test ended with {last.finish_reason}: {last.error}")
    return [token for delta in deltas for token in delta.token_ids], last.stats


async def _generate(submit: Submit, info: EngineInfo, tokenizer: Tokenizer, max_tokens: int) -> SequenceDelta:
    prompt = (tokenizer.encode(_TEXT) or [0])[: max(1, info.max_len // 2)]
    max_tokens = min(max_tokens, info.max_len - len(prompt))
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    speculation = SpeculationParams(max_draft=min(_DEPTH, info.max_draft))
    request = Request("specd-warm-up", tuple(prompt), params, speculation, arrival_s=time.monotonic())
    deltas = [delta async for delta in submit(request)]
    return deltas[-1]
