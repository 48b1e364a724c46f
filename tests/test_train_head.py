"""The differentiable head is the head that serves, pass by pass; the loss and its gradient are the plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specd.attention.torch_attention import TorchAttention
from specd.kv import PagedKV
from specd.models.config import RopeConfig
from specd.models.heads import Head, HeadConfig, HeadFile, head_shapes
from specd.train.head import Keys, PassOutput, TrainableHead, chain_attention
from specd.train.loss import divergence, regression
from tests.tiny import CPU, make_batch

FLAGS: list[dict[str, Any]] = [
    {},
    {"concat": "hidden_first", "feedback": "pre_norm", "attention_bias": True, "fusion_bias": True},
    {"features": "aux"},
    {"embedding_norm": False, "hidden_norm": False, "input_norm": False, "output_norm": False, "features": "pre"},
    {"feedback": "pre_norm", "draft_vocab_size": 20},
]


def make_head(**flags: Any) -> tuple[HeadConfig, dict[str, torch.Tensor], torch.Tensor]:
    config = HeadConfig(
        hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5,
        rope=RopeConfig(), max_position=64, vocab_size=50, **flags,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: 0.3 * torch.randn(shape, generator=generator) + (1.0 if len(shape) == 1 and "norm" in name else 0.0)
        for name, shape in head_shapes(config).items()
    }
    return config, weights, torch.randn(50, 32, generator=generator)


def serving_head(config: HeadConfig, weights: dict[str, torch.Tensor], embedding: torch.Tensor) -> tuple[Head, PagedKV]:
    ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size) * 2
    head = Head(
        HeadFile(config, weights, ids, {}), embedding=embedding, lm_head=embedding, attention=TorchAttention(),
        dtype=torch.float32, device=CPU,
    )  # fmt: skip
    kv = PagedKV(num_layers=1, num_pages=4, page_size=16, num_kv_heads=2, head_dim=16, dtype=torch.float32, device=CPU)
    return head, kv


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags) or "default")
def test_passes_are_what_drafting_computes(flags: dict[str, Any]) -> None:
    """From every origin i: the served head refilled with the pairs 0..i, then drafting from what it fed itself."""
    config, weights, embedding = make_head(**flags)
    length, passes = 7, 4
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (1, length + passes), generator=generator)
    features = torch.randn(1, length, config.feature_size, generator=generator)
    trained = TrainableHead(config, weights, embedding)
    before: list[PassOutput] = []
    for index in range(passes):
        states = before[-1].feedback if before else features
        before.append(trained.forward(tokens[:, index : index + length], states, before))
    for origin in range(length):
        head, kv = serving_head(config, weights, embedding)
        with torch.inference_mode():
            size = origin + 1
            out, fed = head.forward(
                tokens[0, :size], features[0, :size], make_batch([(size, size, [0])]), kv, own=False
            )
            torch.testing.assert_close(before[0].out[0, origin].detach(), out[-1], rtol=1e-3, atol=1e-3)
            for index in range(1, passes):
                token = tokens[0, origin + index, None]
                batch = make_batch([(1, size + index, [0])])
                out, fed = head.forward(token, fed[-1:], batch, kv, own=True)
                torch.testing.assert_close(before[index].out[0, origin].detach(), out[0], rtol=1e-3, atol=1e-3)


def test_chain_attention_is_the_slow_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specd.train.head._QUERY_CHUNK", 4)  # several chunks, the last one short
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 10, 8, generator=generator, dtype=torch.float64)
    keys = [Keys(*torch.randn(2, 2, 3, 10, 8, generator=generator, dtype=torch.float64)) for _ in range(3)]
    got = chain_attention(query, keys[0], keys[1:])
    for i in range(10):
        visible = torch.cat([keys[0].keys[:, :, : i + 1], *(k.keys[:, :, i : i + 1] for k in keys[1:])], dim=2)
        values = torch.cat([keys[0].values[:, :, : i + 1], *(k.values[:, :, i : i + 1] for k in keys[1:])], dim=2)
        scores = torch.einsum("bnd,bnsd->bns", query[:, :, i], visible) * 8**-0.5
        torch.testing.assert_close(got[:, :, i], torch.einsum("bns,bnsd->bnd", scores.softmax(-1), values))


@pytest.mark.parametrize("labelled", [False, True])
def test_divergence_and_its_gradient_are_the_plain_formulas(labelled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specd.train.loss._ROWS", 4)
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(3, 10, 8, generator=generator, dtype=torch.float64).requires_grad_()
    teacher, lm_head = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (10, 20))
    weights = torch.rand(3, 10, generator=generator, dtype=torch.float64) * (torch.arange(10) != 4)
    labels = torch.randint(0, 20, (10,), generator=generator) if labelled else None
    loss = divergence(out, teacher, lm_head, weights, labels)
    (3 * loss).backward()
    got = out.grad
    out.grad = None
    logq = (out @ lm_head.T).log_softmax(-1)
    if labels is None:
        logp = (teacher @ lm_head.T).log_softmax(-1)
        each = (logp.exp() * (logp - logq)).sum(-1)
    else:
        each = -logq.gather(-1, labels.expand(3, -1)[..., None])[..., 0]
    wanted = (weights * each).sum()
    torch.testing.assert_close(loss, wanted)
    (3 * wanted).backward()
    torch.testing.assert_close(got, out.grad)


def test_regression_is_the_weighted_smooth_l1() -> None:
    out, teacher = torch.randn(2, 5, 8), torch.randn(5, 8)
    weights = torch.rand(2, 5)
    each = torch.stack([F.smooth_l1_loss(out[p, r], teacher[r]) for p in range(2) for r in range(5)]).view(2, 5)
    torch.testing.assert_close(regression(out, teacher, weights), (weights * each).sum())
