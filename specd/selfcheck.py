"""Before the first user: a token goes through draft and verify, and the drafter shows what it is worth."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

from specd.errors import EngineError
from specd.log import get_logger
from specd.request import Request, SamplingParams, SequenceDelta, SpeculationParams
from specd.status import EngineInfo
from specd.text import Tokenizer

Submit = Callable[[Request], AsyncIterator[SequenceDelta]]

log = get_logger(__name__)

_TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over"
_TOKENS = 32
_RARELY = 0.05  # of the drafts kept; fewer cost more than they save with any drafter that computes
_ENOUGH = 32  # drafts that a verdict needs
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


async def _generate(submit: Submit, info: EngineInfo, tokenizer: Tokenizer, max_tokens: int) -> SequenceDelta:
    prompt = (tokenizer.encode(_TEXT) or [0])[: max(1, info.max_len // 2)]
    max_tokens = min(max_tokens, info.max_len - len(prompt))
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    speculation = SpeculationParams(max_draft=min(_DEPTH, info.max_draft))
    request = Request("specd-warm-up", tuple(prompt), params, speculation, arrival_s=time.monotonic())
    deltas = [delta async for delta in submit(request)]
    return deltas[-1]
