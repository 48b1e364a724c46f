"""Heads for tests: random ones, and the method's equations written out without pages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specd.attention.torch_attention import TorchAttention
from specd.kv import PagedKV
from specd.models.config import RopeConfig
from specd.models.heads import Head, HeadConfig, HeadFile, head_shapes
from specd.models.native_head import NativeHead
from tests.tiny import CPU, make_batch

VOCABULARY = 97
DRAFT_IDS = torch.arange(3, VOCABULARY, 5)  # 19 of them: not whole strips
NORMS = ("embedding_norm", "hidden_norm", "input_norm", "output_norm")
# Every flag; the four choices are parameters of the tests, the six switches are looped over.
CHOICES = list(
    itertools.product(
        ("last", "pre", "aux"), ("embedding_first", "hidden_first"), ("post_norm", "pre_norm"), (None, len(DRAFT_IDS))
    )
)
SWITCHES = [
    dict(zip((*NORMS, "fusion_bias", "attention_bias"), on, strict=True))
    for on in itertools.product((True, False), repeat=6)
]
AWKWARD = {"features": "aux", "feedback": "pre_norm", "fusion_bias": True, "draft_vocab_size": len(DRAFT_IDS)}
every_choice = pytest.mark.parametrize(("features", "concat", "feedback", "draft_vocab_size"), CHOICES)


def head_config(**overrides: Any) -> HeadConfig:
    """H = 40: the state's half begins inside a group of the kernels, and a row is not whole vectors."""
    fields: dict[str, Any] = {
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_position": 512,
        "vocab_size": VOCABULARY,
    }
    return HeadConfig(**(fields | overrides))


def head_file(config: HeadConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> HeadFile:
    """Random weights; biases and norms far enough from their neutral values to be missed.

    Matrices keep the size of what they are given: without norms, and fed back, a larger gain would magnify rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in head_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        size = 0.2 if len(shape) == 1 else 0.8 * shape[1] ** -0.5
        weights[name] = (1.0 + 0.3 * noise if "norm" in name else size * noise).to(dtype)
    return HeadFile(config, weights, None if config.draft_vocab_size is None else DRAFT_IDS, {})


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def torch_head(file: HeadFile, embedding: torch.Tensor, lm_head: torch.Tensor) -> Head:
    return Head(file, embedding=embedding, lm_head=lm_head, attention=TorchAttention(), dtype=torch.float32, device=CPU)


def paged(
    head: Head | NativeHead, *, num_pages: int = 12, page_size: int = 4, dtype: torch.dtype | None = None
) -> PagedKV:
    """Pages full of NaN: what was never written must not be read."""
    kv = PagedKV(
        num_layers=1,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=head.shape.num_kv_heads,
        head_dim=head.shape.head_dim,
        dtype=dtype or torch.float32,
        device=CPU,
    )
    kv.layers[0].fill_(math.nan)
    return kv


# The equations of the method, over whole sequences -------------------------------------------------------------------


def reference_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if weight is None else x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def reference_turn(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [S, N, D] by its position, as complex numbers made of (i, i + D / 2)."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half).double() / half)
    angles = torch.outer(torch.arange(len(x)).double(), rates)[:, None]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones(()).double(), angles
    )
    return torch.cat((turned.real, turned.imag), -1)


def reference(
    file: HeadFile, embedding: torch.Tensor, lm_head: torch.Tensor, tokens: torch.Tensor, states: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(m, z, logits) of all pairs, in double. states[i]: [F] of the target, or [H] that was fed back."""
    c, w = file.config, {name: tensor.double() for name, tensor in file.weights.items()}
    eps = c.rms_norm_eps
    g = torch.stack(
        [w["feature_proj.weight"] @ s.double() if len(s) == 3 * c.hidden_size else s.double() for s in states]
    )
    e = reference_norm(embedding.double()[tokens], w.get("enorm.weight"), eps)
    g = reference_norm(g, w.get("hnorm.weight"), eps)
    x = torch.cat((e, g) if c.concat == "embedding_first" else (g, e), -1) @ w["eh_proj.weight"].T
    x = x + w.get("eh_proj.bias", 0.0)

    def project(name: str, heads: int) -> torch.Tensor:
        y = reference_norm(x, w.get("layer.input_layernorm.weight"), eps) @ w[f"layer.self_attn.{name}.weight"].T
        return (y + w.get(f"layer.self_attn.{name}.bias", 0.0)).view(len(tokens), heads, c.head_dim)

    q = reference_turn(project("q_proj", c.num_heads), c.rope.theta)
    k = reference_turn(project("k_proj", c.num_kv_heads), c.rope.theta)
    v, group, mixed = project("v_proj", c.num_kv_heads), c.num_heads // c.num_kv_heads, []
    for h in range(c.num_heads):
        scores = q[:, h] @ k[:, h // group].T / math.sqrt(c.head_dim)
        future = torch.ones_like(scores).triu(1).bool()
        mixed.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, h // group])
    z = x + torch.cat(mixed, -1) @ w["layer.self_attn.o_proj.weight"].T
    y = reference_norm(z, w["layer.post_attention_layernorm.weight"], eps)
    gate, up = y @ w["layer.mlp.gate_proj.weight"].T, y @ w["layer.mlp.up_proj.weight"].T
    z = z + (gate / (1 + (-gate).exp()) * up) @ w["layer.mlp.down_proj.weight"].T
    m = reference_norm(z, w.get("norm.weight"), eps)
    logits = m @ lm_head.double().T
    if c.draft_vocab_size is not None:
        outside = torch.ones(VOCABULARY).bool().index_fill(0, DRAFT_IDS, False)
        logits[:, outside] = -math.inf
    return m, z, logits


class Run:
    """Pairs of one sequence through a head: of the target first, in chunks, then some that feed on the head itself."""

    def __init__(self, head: Head | NativeHead, tokens: torch.Tensor, features: torch.Tensor) -> None:
        self.head, self.tokens = head, tokens
        self.states = list(features)
        self.kv, self.pages = paged(head), [7, 2, 9, 0, 11, 4]
        self.outs: list[torch.Tensor] = []
        self.fed: list[torch.Tensor] = []

    def step(self, length: int, *, own: bool) -> None:
        first = len(self.outs)
        states = torch.stack(self.states[first : first + length])
        batch = make_batch([(length, first + length, self.pages)], page_size=4)
        with torch.inference_mode():
            m, fed = self.head.forward(self.tokens[first : first + length], states, batch, self.kv, own=own)
        self.outs += list(m)
        self.fed += list(fed)

    def all(self, chunks: Sequence[int], extends: int) -> Run:
        for length in chunks:
            self.step(length, own=False)
        for _ in range(extends):
            self.states.append(self.fed[-1])
            self.step(1, own=True)
        return self

    @property
    def logits(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.head.logits(torch.stack(self.outs))


def close(got: torch.Tensor, expected: torch.Tensor, config: HeadConfig) -> None:
    """To float's precision of the largest value there is: heads without norms have streams of any size."""
    size = expected[expected.isfinite()].abs().max().item()
    torch.testing.assert_close(got, expected.float(), atol=5e-6 * size, rtol=0, msg=lambda text: f"{config}\n{text}")


def check_run(run: Run, expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor], config: HeadConfig) -> None:
    m, z, logits = expected
    close(torch.stack(run.outs), m, config)
    close(torch.stack(run.fed), m if config.feedback == "post_norm" else z, config)
    close(run.logits, logits, config)
