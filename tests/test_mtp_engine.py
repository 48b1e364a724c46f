"""Engines whose drafter is a real MTP head: plain output, whatever K, refill mode, batch, chunk or prefix hit.

The target's layers say little, so that its next token is nearly a function of the last one; the head is made to say
that function, and a little noise makes it wrong now and then.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from specd.assembly import Parts
from specd.attention.torch_attention import TorchAttention
from specd.drafters import registry
from specd.drafters.mtp import HeadModel, MtpDrafter
from specd.drafters.registry import DraftChoice, mtp_drafter, parse_draft, settle
from specd.engine import Engine
from specd.errors import DraftError
from specd.kv import PagedKV
from specd.models.heads import Head, HeadConfig, HeadFile, head_shapes, write_head
from specd.models.llama import Llama
from specd.models.native import NativeLlama, TensorSource
from specd.models.native_head import NativeHead
from specd.models.registry import LoadedModel
from specd.pipeline import accept as accept_stage
from specd.step import RefillMode
from tests.engines import NATIVE_CONFIG, VOCAB, after_each_step, ask, collect, devices, generate, make_parts, running
from tests.native import LEVELS
from tests.test_identity import PROMPTS
from tests.tiny import CPU, make_batch, make_kv, tiny_llama, tiny_weights

OUTPUT = 18
CONFIG = NATIVE_CONFIG
TIGHT: dict[str, Any] = {"num_slots": 80, "max_len": 64, "max_running": 5, "max_tokens": 16}
KERNELS = ["torch", *(("native",) if LEVELS else ())]
Target = Llama | NativeLlama


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    quiet = ("o_proj.weight", "down_proj.weight")
    return {k: v * 0.03 if k.endswith(quiet) else v for k, v in tiny_weights(CONFIG).items()}


@functools.cache
def target_of(kernels: str) -> Target:
    if kernels == "torch":
        return tiny_llama(config=CONFIG, weights=weights())
    return NativeLlama(CONFIG, TensorSource(weights()), activations="fast", quantize="q8_0")


def head_file(**changes: Any) -> HeadFile:
    """norm(embedding), the state almost unread."""
    fields: dict[str, Any] = {"draft_vocab_size": 80} | changes
    config = HeadConfig(
        hidden_size=CONFIG.hidden_size,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=CONFIG.rms_norm_eps,
        rope=CONFIG.rope,
        max_position=512,
        vocab_size=VOCAB,
        **fields,
    )
    generator = torch.Generator().manual_seed(2)
    tensors = {n: 0.03 * torch.randn(s, generator=generator) for n, s in head_shapes(config).items()}
    for name, shape in head_shapes(config).items():
        if "norm" in name:
            tensors[name] = torch.ones(shape)
    size = config.hidden_size
    tensors["eh_proj.weight"][:, :size] += torch.eye(size)
    if config.output_norm:
        tensors["norm.weight"] = weights()["model.norm.weight"]
    ids = None if config.draft_vocab_size is None else torch.arange(VOCAB - config.draft_vocab_size, VOCAB)
    return HeadFile(config, tensors, ids, {})


def head_of(kernels: str, file: HeadFile) -> HeadModel:
    target = target_of(kernels)
    if isinstance(target, NativeLlama):
        return NativeHead(file, target=target)
    plain = target_of("torch")
    assert isinstance(plain, Llama)
    return Head(
        file, embedding=plain.embedding, lm_head=plain.head, attention=TorchAttention(), dtype=torch.float32, device=CPU
    )


def drafter_of(kernels: str, mode: RefillMode = RefillMode.PADDED, **changes: Any) -> MtpDrafter:
    return MtpDrafter(head_of(kernels, head_file(**changes)), name="mtp:test", max_depth=8, refill_mode=mode)


def parts_of(kernels: str, drafter: MtpDrafter | None, **changes: Any) -> Parts:
    return make_parts(target=target_of(kernels), drafter=drafter, **(TIGHT | {"draft_len": 3} | changes))


def requests(output: int = OUTPUT) -> list[Any]:
    return [
        ask(name, prompt, max_tokens=output, temperature=(0.0, 0.5)[i % 2], seed=i)
        for i, (name, prompt) in enumerate(PROMPTS.items())
    ]


LAYOUTS = ("paired", "stages", "serial-single", "serial-paired", "chaos-single", "chaos-paired", "chaos-stages")
_plain: dict[str, dict[str, list[int]]] = {}


async def plain(kernels: str) -> dict[str, list[int]]:
    if kernels not in _plain:
        found = {}
        for request in requests():
            async with running(make_parts(target=target_of(kernels))) as engine:
                (result,) = await collect(engine, request)
            found[request.request_id] = result.tokens
        _plain[kernels] = found
    return _plain[kernels]


async def check(engine: Engine, kernels: str, *, adaptive: bool = False) -> None:
    want = await plain(kernels)
    first, *others = requests()
    results = await generate(engine, [first]) | await generate(engine, others)
    for name, (result,) in results.items():
        assert result.tokens == want[name], name
    accepted, drafted = (sum(v.values()) for v in (engine.stats().accepted_tokens, engine.stats().draft_tokens))
    # An adaptive length follows the clock: it may draft next to nothing.
    assert adaptive or 0.2 < accepted / drafted < 1


@pytest.mark.parametrize("mode", list(RefillMode))
@pytest.mark.parametrize("draft_len", [1, 2, 3, 4, 5, "adaptive"])
@pytest.mark.parametrize("kernels", KERNELS)
async def test_matrix(kernels: str, draft_len: int | str, mode: RefillMode) -> None:
    """Greedy and seeded, alone and mixed: chunked prefill, prefix hits, preemption."""
    async with running(parts_of(kernels, drafter_of(kernels, mode), draft_len=draft_len)) as engine:
        await check(engine, kernels, adaptive=draft_len == "adaptive")
        stats = engine.stats()
    assert stats.cached_tokens > 0
    assert stats.preemptions > 0


@pytest.mark.parametrize("mode", list(RefillMode))
@pytest.mark.parametrize("draft_len", [1, 4, "adaptive"])
@pytest.mark.parametrize("kernels", KERNELS)
async def test_overridden_by_ngrams(kernels: str, draft_len: int | str, mode: RefillMode) -> None:
    """Rows with a match verify its tokens, the head follows them all the same."""
    parts = parts_of(kernels, drafter_of(kernels, mode), draft_len=draft_len, proposes=True)
    async with running(parts) as engine:
        await check(engine, kernels, adaptive=draft_len == "adaptive")
        if draft_len != "adaptive":
            assert all(engine.stats().accepted_tokens[source] > 0 for source in ("drafter", "ngram"))


@pytest.mark.parametrize(
    "layout", ["paired", "stages", "serial-single", "serial-paired", "chaos-single", "chaos-paired", "chaos-stages"]
)
@pytest.mark.parametrize("draft_len", [1, 3])
@pytest.mark.parametrize("kernels", KERNELS)
async def test_layouts(kernels: str, draft_len: int, layout: str) -> None:
    drafter = drafter_of(kernels)
    async with running(parts_of(kernels, drafter, draft_len=draft_len, device=devices(layout, seed=1))) as engine:
        await check(engine, kernels)


@pytest.mark.parametrize(
    "changes",
    [
        {"feedback": "pre_norm", "draft_vocab_size": None},
        {"input_norm": False, "hidden_norm": False},
        {"fusion_bias": True, "attention_bias": True},
    ],
)
@pytest.mark.parametrize("kernels", KERNELS)
async def test_other_heads(kernels: str, changes: dict[str, Any]) -> None:
    async with running(parts_of(kernels, drafter_of(kernels, **changes))) as engine:
        await check(engine, kernels)


def states_of(target: Target, tokens: list[int]) -> torch.Tensor:
    """The target's states of all tokens, computed anew."""
    kv = make_kv(target, num_pages=8)  # type: ignore[arg-type]
    with torch.inference_mode():
        hidden, _ = target.forward(torch.tensor(tokens), make_batch([(len(tokens), len(tokens), list(range(8)))]), kv)
    return hidden


def pairs_of(head: HeadModel, target: Target, tokens: list[int], count: int) -> torch.Tensor:
    """The head's keys and values [count, 2, heads, D] of the first pairs of a sequence, in a run of its own."""
    shape = head.shape
    kv = PagedKV(
        num_layers=1,
        num_pages=8,
        page_size=16,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    with torch.inference_mode():
        states = states_of(target, tokens)[:count]
        batch = make_batch([(count, count, list(range(8)))])
        head.forward(torch.tensor(tokens[1 : count + 1]), states, batch, kv, own=False)
    return kv.layers[0].transpose(1, 2).flatten(0, 1)[:count]


@pytest.mark.parametrize("mode", list(RefillMode))
@pytest.mark.parametrize("kernels", KERNELS)
async def test_slots_below_the_mark_hold_the_uncached_pairs(
    kernels: str, mode: RefillMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after prefix hits that part at a block's border: its last pair has another token after it."""
    drafter = drafter_of(kernels, mode)
    parts = parts_of(kernels, drafter)
    head, target, seen = drafter._head, target_of(kernels), 0

    def compare() -> None:
        nonlocal seen
        for sequence in parts.scheduler.running:
            count = min(sequence.drafter_len, len(sequence.tokens) - 1)
            if count < 1:
                continue
            slots = torch.tensor([sequence.pages[i // 16] * 16 + i % 16 for i in range(count)])
            held = drafter.kv.layers[0].transpose(1, 2).flatten(0, 1)[slots]
            expected = pairs_of(head, target, list(sequence.tokens), count)
            if kernels == "native":
                assert torch.equal(held, expected), sequence.tokens
            else:
                torch.testing.assert_close(held, expected, atol=1e-4, rtol=1e-4)
            seen += count

    after_each_step(monkeypatch, parts, compare)
    block = list(PROMPTS["family"][:16])
    border = [ask("one", [*block, 40, 41], max_tokens=6), ask("two", [*block, 50, 51], max_tokens=6)]
    async with running(parts) as engine:
        await generate(engine, border[:1])
        await generate(engine, border[1:])
        await check(engine, kernels)
    assert seen > 1000


@pytest.mark.parametrize("kind", ["paired", "serial-paired"])
async def test_nothing_waits_between_accept_and_refill(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K = 1, PADDED: accept is held back until the refill is launched, the refill until the next step is scheduled.

    Where the host must not work beside the streams, the schedule comes after the refill: so the check can fail.
    """
    parts = parts_of("torch", drafter_of("torch"), draft_len=1, device=devices(kind), max_tokens=64)
    refill, drafter, schedule = parts.refill, parts.drafter, parts.scheduler.schedule
    assert refill is not None
    assert drafter is not None
    launch, compute, accept = refill.launch_padded, drafter.refill, accept_stage.accept_rows
    launched, scheduled = (collections.defaultdict[int, threading.Event](threading.Event) for _ in range(2))  # by step
    steps: list[int] = []  # of the refills
    launched_before: list[bool] = []
    scheduled_during: list[bool] = []

    def launch_padded(plan: Any, *handles: Any) -> Any:
        steps.append(plan.step)
        launched[plan.step].set()
        return launch(plan, *handles)

    def held_accept(rule: Any, settings: Any, plan: Any, *rest: Any) -> Any:
        launched_before.append(launched[plan.step].wait(20.0))
        return accept(rule, settings, plan, *rest)

    def held_refill(*args: Any, **options: Any) -> Any:
        held_s = 20.0 if kind == "paired" else 0.1
        scheduled_during.append(scheduled[steps[len(scheduled_during)] + 1].wait(held_s))
        return compute(*args, **options)

    def note(step: int) -> Any:
        scheduled[step].set()
        return schedule(step)

    monkeypatch.setattr(accept_stage, "accept_rows", held_accept)
    refill.launch_padded = launch_padded  # type: ignore[method-assign]
    drafter.refill = held_refill  # type: ignore[method-assign]
    parts.scheduler.schedule = note  # type: ignore[method-assign]
    async with running(parts) as engine:
        await generate(engine, [ask("a", PROMPTS["family"][:8], max_tokens=16)])
    assert len(launched_before) > 8
    assert all(launched_before)
    decoding = scheduled_during[1:]  # the first is the prompt's, which nobody waits for
    assert all(decoding) if kind == "paired" else not any(decoding)


def test_heads_of_other_targets_are_refused(tmp_path: Path) -> None:
    loaded = loaded_target()
    file = head_file()
    for name, target in (("layers", {"num_layers": 3}), ("good", {"num_layers": 2})):
        write_head(tmp_path / name, file.config, file.weights, token_ids=file.token_ids, target=target)
    assert mtp_drafter(loaded, tmp_path / "good").traits.shifted
    with pytest.raises(DraftError, match="number of layers is 3; that of tiny is 2"):
        mtp_drafter(loaded, tmp_path / "layers")
    with pytest.raises(DraftError, match="builtin"):
        parse_draft("mtp:builtin")
    assert parse_draft("mtp:some/folder").name == "mtp:some/folder"
    for number in ("0", "-1", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT TWO}", "9" * 5000):
        with pytest.raises(DraftError, match="layers:N"):
            parse_draft(f"layers:{number}")


def test_the_heads_that_come_with_specd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SHIPPED", tmp_path)
    loaded, file = loaded_target(), head_file()
    both, mtp = parse_draft("mtp+ngram"), parse_draft("mtp")
    assert settle(parse_draft("auto"), loaded) == DraftChoice("ngram")
    with pytest.raises(DraftError, match="'mtp': specd has none for tiny"):
        settle(mtp, loaded)

    for name, layers in (("tin", 2), ("tiny", 2), ("other", 2)):
        write_head(
            tmp_path / "mtp" / name, file.config, file.weights, token_ids=file.token_ids, target={"num_layers": layers}
        )
    assert settle(both, loaded).name == "mtp:tiny+ngram"
    assert settle(mtp, loaded).name == "mtp:tiny"
    assert not settle(mtp, loaded).uses_ngram
    assert settle(both, dataclasses.replace(loaded, name="snapshot"), "Tiny-Q8").argument == "tiny"
    for stranger in ("snapshot", "tinyish", "tiny2-Q8"):
        with pytest.raises(DraftError, match=f"none for {stranger}"):
            settle(both, dataclasses.replace(loaded, name=stranger))
    assert settle(parse_draft("auto"), loaded).name == "mtp:tiny+ngram"
    assert mtp_drafter(loaded, settle(mtp, loaded).folder).traits.name == "mtp:tiny"
    with pytest.raises(DraftError, match="'lm': specd has none for tiny; it has one for no model at all"):
        settle(parse_draft("lm"), loaded)
    write_head(tmp_path / "mtp" / "tiny", file.config, file.weights, token_ids=file.token_ids, target={"num_layers": 3})
    with pytest.raises(DraftError, match="none for tiny"):
        settle(both, loaded)
    assert settle(parse_draft("auto"), loaded) == DraftChoice("ngram")
    assert settle(parse_draft("mtp:else/where"), loaded).argument == "else/where"


def loaded_target() -> LoadedModel:
    return LoadedModel(
        model=target_of("torch"),
        config=CONFIG,
        path=Path("tiny"),
        name="tiny",
        generation_defaults={},
        eos_ids=(0,),
        bos_id=None,
        weight_bytes=0,
    )
