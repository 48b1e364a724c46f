"""The long proofs on the real model: `pytest -m slow` (some 20 minutes on two cores).

Greedy: 20 prompts of 128 tokens in batches of 8, every drafter, K of 1, 4 and 8, with chunked prompts, prefix hits and
forced preemption in the same run, against the committed tokens of transformers; these are made again for a few prompts.
Sampled: whatever drafts, the tokens are those of plain decoding with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reference_tokens import generate, load_transformers
from specd.request import Request, SamplingParams, SpeculationParams
from specd.sampling.noise import Purpose, exponential, position_keys, row_key
from tests import real
from tests.tiny import make_batch, make_kv

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]

NUM_PROMPTS = 20
NUM_TOKENS = 128
BATCH = 8
STEP_TOKENS = 96  # less than a long prompt, more than 8 rows of 8 drafts: chunks and full drafts in one step
NUM_PAGES = 72  # 8 long sequences need more than 100: somebody is preempted
NOISE = 0.04

SAMPLED_TOKENS = 64
SAMPLED_PAGES = 40

DRAFTS = ("ngram", "layers:4", "lm:target", "lm:noisy", "mtp", "mtp+ngram")


@pytest.fixture(scope="module", autouse=True)
def _one_copy_of_the_weights() -> Iterator[None]:
    with real.shared_weights():
        yield


@pytest.fixture(scope="module")
def models(real_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = real.write_noisy_copy(real_model_path, tmp_path_factory.mktemp("noisy"), strength=NOISE)
    return {"target": real_model_path, "noisy": folder}


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Writes to the terminal also when the test passes."""

    def write(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", end="")

    return write


def draft_name(draft: str, models: dict[str, Path]) -> str:
    kind, _, argument = draft.partition(":")
    return f"lm:{models[argument]}" if kind == "lm" else draft


# ---------------------------------------------------------------- greedy


@pytest.mark.parametrize(("draft", "k"), [("none", 0), *((draft, k) for draft in DRAFTS for k in (1, 4, 8))])
async def test_greedy_tokens_are_transformers(
    draft: str, k: int, models: dict[str, Path], report: Callable[[str], None]
) -> None:
    cases = list(real.reference().values())[-NUM_PROMPTS:]
    assert max(len(case.prompt_ids) for case in cases) > STEP_TOKENS, "no prompt is chunked"
    async with real.engine_of(
        models["target"],
        draft_name(draft, models),
        draft_len=k,
        max_running=BATCH,
        max_tokens=STEP_TOKENS,
        num_pages=NUM_PAGES,
    ) as engine:
        outputs = await real.run(engine, [real.greedy(case, NUM_TOKENS) for case in cases])
        stats = engine.stats()
    found = real.splits(outputs, NUM_TOKENS)
    real.check(found, what=f"{draft} K={k}", report=report)
    drafted, accepted = sum(stats.draft_tokens.values()), sum(stats.accepted_tokens.values())
    report(
        f"{draft} K={k}: {len(outputs)} prompts, {len(found)} splits, {accepted}/{drafted} drafts kept, "
        f"{stats.preemptions} preemptions, {stats.cached_tokens} cached prompt tokens"
    )
    assert len(found) <= 2, "rounding alone does not split so many"
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert (drafted > 0) == (k > 0)
    if draft == "lm:target":
        assert accepted >= 0.99 * drafted, "the target does not agree with itself"
    elif draft == "lm:noisy":
        assert 0.1 * drafted < accepted < 0.95 * drafted, "the noise is too strong, or too weak, to prove much"


def test_the_committed_reference_is_what_transformers_says(
    real_model_path: Path, report: Callable[[str], None]
) -> None:
    """One prompt of each kind, live."""
    model = load_transformers(real_model_path)
    torch.set_num_threads(real.THREADS)
    for name in ("chat-0", "copy-7", "raw-2"):
        case = real.reference()[name]
        live = generate(model, case.prompt_ids, NUM_TOKENS)
        position = real.first_difference(live.output_ids, case.output_ids)
        if position is not None:
            real.check([real.Split(name, position, case.gaps[position])], what="transformers live", report=report)
        assert live.gaps[:position] == pytest.approx(case.gaps[:position], abs=2e-4)


# ---------------------------------------------------------------- sampled


def sampled_requests(*, max_drafts: tuple[int | None, ...]) -> list[Request]:
    """8 prompts, each with parameters and a seed of its own; max_drafts go round."""
    cases = list(real.reference().values())[::2][:8]
    params = [
        SamplingParams(max_tokens=SAMPLED_TOKENS, seed=100, temperature=0.7, ignore_eos=True),
        SamplingParams(max_tokens=SAMPLED_TOKENS, seed=101, temperature=1.0, top_k=40, ignore_eos=True),
        SamplingParams(max_tokens=SAMPLED_TOKENS, seed=102, temperature=1.2, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=SAMPLED_TOKENS, seed=103, temperature=0.5, min_p=0.05, ignore_eos=True),
    ]
    return [
        Request(
            case.name,
            case.prompt_ids,
            params[i % len(params)],
            SpeculationParams(max_draft=max_drafts[i % len(max_drafts)]),
        )
        for i, case in enumerate(cases)
    ]


def race(path: Path, request: Request, tokens: tuple[int, ...]) -> torch.Tensor:
    """What the next token after prompt + tokens is drawn by, f64[V]: logits with the seed's noise, before filters.

    The largest of those that the filters leave is drawn; two that are closer than rounding may change places.
    """
    model: Any = real.load(path).model
    context = [*request.prompt_ids, *tokens]
    num_pages = -(-len(context) // real.PAGE_SIZE)
    kv = make_kv(model, num_pages=num_pages, page_size=real.PAGE_SIZE)
    batch = make_batch([(len(context), len(context), list(range(num_pages)))], page_size=real.PAGE_SIZE)
    with torch.inference_mode():
        hidden, _ = model.forward(torch.tensor(context), batch, kv)
        logits = model.logits(hidden[-1:])[0].double()
    key = torch.tensor([row_key(request.sampling.seed, request.prompt_index, 0)])
    keys = position_keys(key, torch.tensor([len(context)]), Purpose.TARGET)
    noise = exponential(keys, len(logits))[0].double()
    return logits - request.sampling.temperature * noise.log()


@pytest.fixture(scope="module")
def plain_outputs() -> dict[str, real.Output]:
    """Filled by the first test that needs it: an engine lives in a test's own event loop."""
    return {}


@pytest.mark.parametrize(
    ("draft", "draft_len", "max_drafts"),
    [
        ("ngram", 4, (None,)),
        ("ngram", "adaptive", (None,)),
        ("layers:4", 8, (0, 1, 3, 8, 5)),
        ("layers:4", "adaptive", (None,)),
        ("lm:target", 8, (7, 2, 0, 6, 4)),
        ("lm:noisy", 4, (None,)),
        ("lm:noisy", "adaptive", (None,)),
        ("mtp", 1, (None,)),
        ("mtp", 5, (3, 0, 1, 5, 2)),
        ("mtp+ngram", 4, (None,)),
        ("mtp+ngram", "adaptive", (None,)),
    ],
)
async def test_sampled_tokens_are_those_of_plain_decoding(
    draft: str,
    draft_len: int | str,
    max_drafts: tuple[int | None, ...],
    models: dict[str, Path],
    plain_outputs: dict[str, real.Output],
    report: Callable[[str], None],
) -> None:
    """Also with mixed K in one batch, chunked prompts, and after preemption; plain decoding is not preempted."""
    target = models["target"]
    if not plain_outputs:
        async with real.engine_of(target, "none", draft_len=0) as engine:
            plain_outputs |= await real.run(engine, sampled_requests(max_drafts=(None,)))
            assert engine.stats().preemptions == 0
    requests = sampled_requests(max_drafts=max_drafts)
    async with real.engine_of(
        target, draft_name(draft, models), draft_len=draft_len, max_tokens=STEP_TOKENS, num_pages=SAMPLED_PAGES
    ) as engine:
        outputs = await real.run(engine, requests)
        stats = engine.stats()
    found = []
    for request in requests:
        ours, plain = outputs[request.request_id].token_ids, plain_outputs[request.request_id].token_ids
        assert len(ours) == SAMPLED_TOKENS
        position = real.first_difference(ours, plain)
        if position is not None:
            scores = race(target, request, plain[:position])
            gap = float((scores[ours[position]] - scores[plain[position]]).abs())
            found.append(real.Split(request.request_id, position, gap))
    what = f"sampled {draft} {draft_len}"
    real.check(found, what=what, report=report)
    drafted, accepted = sum(stats.draft_tokens.values()), sum(stats.accepted_tokens.values())
    report(f"{what}: {len(found)} splits, {accepted}/{drafted} drafts kept, {stats.preemptions} preemptions")
    assert stats.preemptions > 0
    assert drafted > 0 or draft_len == "adaptive"  # which may find that it does not pay


async def test_seeds_matter_and_splits_are_measured_right(real_model_path: Path) -> None:
    """The comparison above would be idle if sampling ignored its seed, and lax if `race` were not what is drawn by."""
    case = real.reference()["raw-2"]
    requests = [
        Request(str(seed), case.prompt_ids, SamplingParams(max_tokens=24, seed=seed, temperature=1.0, ignore_eos=True))
        for seed in (1, 2, 3)
    ]
    async with real.engine_of(real_model_path, "none", draft_len=0) as engine:
        outputs = await real.run(engine, requests)
    assert len({output.token_ids for output in outputs.values()}) == 3
    for request in requests:
        tokens = outputs[request.request_id].token_ids
        for position in range(3):
            assert int(race(real_model_path, request, tokens[:position]).argmax()) == tokens[position]
