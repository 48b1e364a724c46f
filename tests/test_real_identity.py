"""The real model says what transformers says, whoever drafts: greedy token ids against the committed reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import real

pytestmark = pytest.mark.real

NAMES = ("chat-2", "chat-5", "copy-4", "copy-7", "raw-1", "raw-3")
NUM_TOKENS = 48
K = 4
OTHER_STEPS = 10  # prefill, the engine's own warm-up, and steps that found nothing to do


@pytest.fixture(scope="module", autouse=True)
def _one_copy_of_the_weights() -> Iterator[None]:
    with real.shared_weights():
        yield


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Writes to the terminal also when the test passes."""

    def write(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}")

    return write


@pytest.mark.parametrize("draft", ["none", "ngram", "layers:4", "lm:target", "lm", "mtp", "mtp+ngram"])
async def test_greedy_tokens_are_transformers(draft: str, real_model_path: Path, report: Callable[[str], None]) -> None:
    cases = [real.reference()[name] for name in NAMES]
    draft = draft.replace("target", str(real_model_path))
    async with real.engine_of(real_model_path, draft, draft_len=K, max_running=len(cases)) as engine:
        outputs = await real.run(engine, [real.greedy(case, NUM_TOKENS) for case in cases])
        stats = engine.stats()
    found = real.splits(outputs, NUM_TOKENS)
    real.check(found, what=draft, report=report)
    drafted, accepted = sum(stats.draft_tokens.values()), sum(stats.accepted_tokens.values())
    if draft == "none":
        assert drafted == 0
        assert stats.steps <= NUM_TOKENS + OTHER_STEPS, "the prompts were not one batch"
    elif draft.startswith("lm:"):
        # The target as its own draft: every draft is kept, and each step refills the last draft and the new token.
        assert accepted == drafted or found
        assert stats.steps <= NUM_TOKENS // (K + 1) + OTHER_STEPS
    else:
        assert 0 < accepted < drafted


async def test_the_comparison_can_fail(real_model_path: Path) -> None:
    """A wrong token at a place where nothing is close is not taken for rounding."""
    case = real.reference()["raw-1"]
    async with real.engine_of(real_model_path, "none", draft_len=0) as engine:
        outputs = await real.run(engine, [real.greedy(case, 8)])
        stopped = await real.run(engine, [real.greedy(case, 6)])
    lines: list[str] = []
    real.check(real.splits(outputs, 8), what="none", report=lines.append)
    wrong = list(outputs[case.name].token_ids)
    wrong[5] += 1
    changed = {case.name: real.Output(tuple(wrong), outputs[case.name].stats)}
    for bad in (changed, stopped):
        with pytest.raises(AssertionError, match="raw-1"):
            real.check(real.splits(bad, 8), what="wrong", report=lines.append)
