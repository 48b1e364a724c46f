"""Real engines around tiny models: real assembly, scheduler, stages and device; only the weights are small.

async with running(tiny_parts(draft="layers", draft_len=4)) as engine:
    results = await generate(engine, [ask("a", prompt, max_tokens=20)])
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from specd.assembly import Parts, build, page_bytes
from specd.assembly import kv_dtype as cache_dtype
from specd.config import Config, KVConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from specd.device import Device, chaos_device, cpu_device, inline_device
from specd.drafters.base import Drafter
from specd.drafters.lm import LMDrafter
from specd.drafters.registry import DraftChoice, parse_draft, settle
from specd.engine import Engine
from specd.models.base import Model
from specd.models.llama import Llama
from specd.models.native import Activations, NativeLlama, TensorSource
from specd.models.registry import LoadedModel
from specd.request import FinishReason, Request, SamplingParams, SequenceDelta, SpeculationParams, TokenLogprob
from specd.text import Tokenizer
from specd.timeline import Timeline
from tests.tiny import LLAMA3_ROPE, ReferenceAttention, make_batch, make_kv, tiny_config, tiny_llama, tiny_weights

VOCAB = 97
EOS = 0
SPECIAL = ("<|end|>", "<|pad|>")

# A grouped-query model with llama3 RoPE and its own head: two layers are enough to be wrong in every way.
SMALL: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_layers": 2, "head_dim": 12}
CONFIG = tiny_config(vocab_size=VOCAB, rope=LLAMA3_ROPE, **SMALL)


@functools.cache
def tokenizer() -> Tokenizer:
    """97 tokens: two special ones, then one printable ASCII character each, the space first."""
    letters = sorted(c for c in ByteLevel.alphabet() if "!" <= c <= "~")
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, "Ġ", *letters])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL])
    return Tokenizer(backend, eos_ids=(EOS,), bos_id=None, add_bos=False, chat_template=None)


@functools.cache
def target_model(seed: int = 0) -> Llama:
    return tiny_llama(config=CONFIG, weights=tiny_weights(CONFIG, seed))


@functools.cache
def noisy_model(scale: float = 0.01) -> Llama:
    """The target with seeded noise on every weight: a draft that is often right and often wrong."""
    return tiny_llama(config=CONFIG, weights=with_noise(tiny_weights(CONFIG), scale))


# What specd's own kernels can compute too: whole groups of 32 columns, whole vectors a head.
NATIVE_CONFIG = tiny_config(vocab_size=VOCAB, rope=LLAMA3_ROPE, num_layers=2)


@functools.cache
def native_model(activations: Activations) -> NativeLlama:
    source = TensorSource(tiny_weights(NATIVE_CONFIG))
    return NativeLlama(NATIVE_CONFIG, source, activations=activations, quantize="q8_0")


@functools.cache
def native_noisy(activations: Activations) -> NativeLlama:
    source = TensorSource(with_noise(tiny_weights(NATIVE_CONFIG), 0.01))
    return NativeLlama(NATIVE_CONFIG, source, activations=activations, quantize="q8_0")


def with_noise(weights: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {k: v + scale * torch.randn(v.shape, generator=generator) for k, v in weights.items()}


def lm(model: Model, *, vocab_size: int = VOCAB, max_context: int | None = None) -> LMDrafter:
    return LMDrafter(model, name="lm:test", vocab_size=vocab_size, max_depth=64, max_context=max_context)


def drafter_of(draft: str, target: Model) -> Drafter | None:
    """`draft`: "none", "ngram", "layers" (one layer of the target), "lm" (a noisy copy), "lm-self" (the target)."""
    if draft == "layers":
        assert isinstance(target, (Llama, NativeLlama))
        return lm(target.truncated(1))
    if draft == "lm":
        return lm(native_noisy(target.activations) if isinstance(target, NativeLlama) else noisy_model())
    return {"none": None, "ngram": None, "lm-self": lm(target)}[draft]


def devices(kind: str, *, seed: int = 0) -> Device:
    """`kind` is "inline", "single", "paired", "stages", or "chaos-" or "serial-" and one of the last three.

    serial: the host does not work beside the streams, as where all cores compute.
    """
    if kind == "inline":
        return inline_device()
    if kind.startswith("chaos-"):
        return chaos_device(seed, layout=kind.removeprefix("chaos-"))
    layout = kind.removeprefix("serial-")
    return cpu_device(layout=layout, threads=1, timeline=Timeline(), overlaps=layout == kind)


def make_parts(
    *,
    target: Model | None = None,
    draft: str = "none",
    drafter: Drafter | None = None,
    draft_len: int | str = 4,
    device: str | Device = "inline",
    page_size: int = 16,
    num_slots: int = 1024,
    max_len: int = 128,
    max_running: int = 8,
    max_tokens: int = 512,
    eos: tuple[int, ...] = (EOS,),
    mixed: str = "speculate",
    kv_dtype: str = "auto",
    proposes: bool = False,
    **speculation: Any,
) -> Parts:
    """num_slots: KV slots of the pool. `drafter` wins over `draft`, which is a name of `drafter_of`."""
    model = target or target_model()
    own = drafter or drafter_of(draft, model)
    config = Config(
        model=ModelConfig(path="tiny", max_len=max_len),
        speculation=SpeculationConfig(draft=draft, draft_len=draft_len, self_check=False, **speculation),
        scheduler=SchedulerConfig(max_running=max_running, max_tokens=max_tokens, mixed=mixed),  # type: ignore[arg-type]
        kv=KVConfig(memory=1, page_size=page_size, dtype=kv_dtype),  # type: ignore[arg-type]
    )
    memory = num_slots // page_size * page_bytes(model, own, page_size, cache_dtype(config, model))
    config = dataclasses.replace(config, kv=dataclasses.replace(config.kv, memory=memory))
    loaded = LoadedModel(
        model=model,  # type: ignore[arg-type]
        config=CONFIG,
        path=Path("tiny"),
        name="tiny",
        generation_defaults={},
        eos_ids=eos,
        bos_id=None,
        weight_bytes=model.weight_bytes(),
    )
    choice = DraftChoice("lm", "test", proposes=proposes) if own is not None else settle(parse_draft(draft), loaded)
    where = devices(device) if isinstance(device, str) else device
    return build(config, choice, target=loaded, tokenizer=tokenizer(), drafter=own, device=where)


@contextlib.asynccontextmanager
async def running(parts: Parts) -> AsyncIterator[Engine]:
    """An engine without a warm-up; at the end its pages must add up and nobody may own one."""
    engine = await Engine.start(parts, warm=False)
    try:
        yield engine
        assert await engine.drain(30.0), "the engine did not drain"
        assert_nothing_owned(parts)
    finally:
        await engine.close()


def assert_nothing_owned(parts: Parts) -> None:
    pool = parts.scheduler.pool
    pool.check()
    assert pool.num_free == pool.num_pages, "somebody still owns pages"
    assert not parts.scheduler.running
    assert not parts.scheduler.waiting
    assert not any(tenant.num_live for tenant in parts.scheduler.waiting._tenants.values())


def ask(
    request_id: str,
    prompt: Sequence[int],
    *,
    n: int = 1,
    prompt_index: int = 0,
    speculation: SpeculationParams | None = None,
    **sampling: Any,
) -> Request:
    """Greedy and deaf to EOS unless told otherwise."""
    fields = {"max_tokens": 16, "seed": 7, "temperature": 0.0, "ignore_eos": True} | sampling
    return Request(
        request_id,
        tuple(prompt),
        SamplingParams(**fields),
        speculation=speculation or SpeculationParams(detail="detailed"),
        n=n,
        prompt_index=prompt_index,
    )


@dataclasses.dataclass(slots=True)
class Result:
    """All deltas of one choice, put together."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    last: SequenceDelta | None = None

    def add(self, delta: SequenceDelta) -> None:
        assert self.last is None, "a delta after the last one"
        self.tokens += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.last = delta

    @property
    def reason(self) -> FinishReason | None:
        return None if self.last is None else self.last.finish_reason

    @property
    def outcome(self) -> tuple[list[int], str, FinishReason | None, str | int | None]:
        """What a client sees, timing and speculation left out."""
        return self.tokens, self.text, self.reason, None if self.last is None else self.last.stop_reason


async def collect(engine: Engine, request: Request) -> list[Result]:
    """One request to its end: a result for each choice."""
    results = [Result() for _ in range(request.n)]
    await engine.prepare_grammar(request)
    async for delta in engine.submit(request):
        results[delta.index].add(delta)
    return results


async def generate(engine: Engine, requests: Iterable[Request]) -> dict[str, list[Result]]:
    """All at once."""
    requests = list(requests)
    done = await asyncio.wait_for(asyncio.gather(*(collect(engine, request) for request in requests)), 60)
    return {request.request_id: results for request, results in zip(requests, done, strict=True)}


# ---------------------------------------------------------------- the reference

_answers: dict[tuple[int, tuple[int, ...]], list[int]] = {}


def full_logits(model: Llama, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [V] after `tokens`, everything computed anew in one forward with the plain-loop attention."""
    plain = tiny_llama_like(model)
    pages = list(range(-(-len(tokens) // 16)))
    with torch.inference_mode():
        kv = make_kv(plain, num_pages=len(pages))
        hidden, _ = plain.forward(torch.tensor(list(tokens)), make_batch([(len(tokens), len(tokens), pages)]), kv)
        return plain.logits(hidden[-1:])[0]


@functools.cache
def tiny_llama_like(model: Llama) -> Llama:
    """The same weights behind ReferenceAttention."""
    plain = copy.copy(model)
    plain.attention = ReferenceAttention()
    return plain


def greedy_answer(model: Llama, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Plain greedy decoding without any cache: no KV is kept from one token to the next."""
    key = (id(model), tuple(prompt))
    answer = _answers.setdefault(key, [])
    while len(answer) < num_tokens:
        answer.append(int(full_logits(model, [*prompt, *answer]).argmax()))
    return answer[:num_tokens]


Hook = Callable[[], None]


def after_each_step(monkeypatch: Any, parts: Parts, check: Hook) -> None:
    """Calls `check` when a step has been committed. On the inline device its refill has run then."""
    original = parts.scheduler.apply

    def apply(*args: Any) -> list[SequenceDelta]:
        deltas = original(*args)
        check()
        return deltas

    monkeypatch.setattr(parts.scheduler, "apply", apply)
