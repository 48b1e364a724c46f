"""Token trees through acceptance: the kept path, its distribution, processing per node, and compaction of its KV."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch

from specd.kv import PagedKV
from specd.sampling.batch import SamplingBatch, sampling_batch
from specd.sampling.chain import accept
from specd.sampling.process import process
from specd.sampling.tree import TREE_RULES, TreeAcceptance, accept_tree, compaction_slots, tree_batch
from specd.step import RowSampling, StepPlan, indptr
from specd.tensors import DraftTokens, TargetOutput, TokenTree, batch_info
from tests.sampling_plans import CPU, advance, info_of, params, plan_of, row
from tests.toy_world import ALPHA, goodness, tables

V = 6
# 0 is the root; 1, 2, 3 its children; 4, 5 below 1; 6 below 3; 7 below 4
PARENTS = (-1, 0, 0, 0, 1, 1, 3, 4)
DEPTHS = (0, 1, 1, 1, 2, 2, 2, 3)
NUM_NODES = len(PARENTS)


def tree_of(tokens: list[list[int]], parents: tuple[int, ...] = PARENTS, depths: tuple[int, ...] = DEPTHS) -> TokenTree:
    rows = len(tokens)
    return TokenTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents).expand(rows, -1).contiguous(),
        depths=torch.tensor(depths).expand(rows, -1).contiguous(),
    )


def accept_rows(
    states: list[RowSampling], tree: TokenTree, logits: torch.Tensor, *, rule: str = "exact", max_depth: int = 3
) -> TreeAcceptance:
    plan = plan_of(states, [tree.tokens.shape[1] - 1] * len(states))
    batch = tree_batch(sampling_batch(plan, logits.shape[-1], CPU), tree)
    return accept_tree(TargetOutput(logits=logits), tree, info_of(plan), batch, max_depth=max_depth, rule=rule)


def one_hot_logits(wanted: list[int], vocab_size: int = 20) -> torch.Tensor:
    logits = torch.zeros(len(wanted), vocab_size)
    logits[torch.arange(len(wanted)), torch.tensor(wanted)] = 60.0
    return logits


# What the target says after each node, and the path and tokens that must follow; the tree's tokens are 9 + node.
SCRIPTS = [
    ([1, 0, 0, 0, 0, 0, 0, 0], [0], [1]),
    ([10, 1, 0, 0, 0, 0, 0, 0], [0, 1], [10, 1]),
    ([11, 0, 5, 0, 0, 0, 0, 0], [0, 2], [11, 5]),
    ([12, 0, 0, 15, 0, 0, 2, 0], [0, 3, 6], [12, 15, 2]),
    ([10, 13, 0, 0, 16, 0, 0, 4], [0, 1, 4, 7], [10, 13, 16, 4]),
    ([10, 14, 0, 0, 16, 3, 0, 0], [0, 1, 5], [10, 14, 3]),
    ([10, 15, 0, 0, 0, 0, 0, 0], [0, 1], [10, 15]),  # 15 is in the tree, but below another node
]


@pytest.mark.parametrize("rule", list(TREE_RULES))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_kept_path_is_the_one_the_target_would_walk(rule: str, temperature: float) -> None:
    """All scripts as the rows of one batch; with p all but one-hot both rules give it."""
    states = [row(params(seed=i, temperature=temperature)) for i in range(len(SCRIPTS))]
    tree = tree_of([[9 + node for node in range(NUM_NODES)]] * len(SCRIPTS))
    logits = torch.cat([one_hot_logits(wanted) for wanted, _, _ in SCRIPTS])
    out = accept_rows(states, tree, logits, rule=rule)
    for i, (_, path, emitted) in enumerate(SCRIPTS):
        assert out.path[i].equal(torch.tensor([*path, *[-1] * (4 - len(path))]))
        assert out.acceptance.tokens[i].equal(torch.tensor([*emitted, *[-1] * (4 - len(emitted))]))
        assert int(out.acceptance.num_accepted[i]) == len(path) - 1
        assert int(out.acceptance.next_token[i]) == emitted[-1]
        assert int(out.acceptance.last_row[i]) == i * NUM_NODES + path[-1]
    assert not out.acceptance.failed.any()


def test_a_depth_limit_ends_the_path() -> None:
    tree = tree_of([[9 + node for node in range(NUM_NODES)]])
    out = accept_rows([row(params(temperature=0.0))], tree, one_hot_logits(SCRIPTS[4][0]), max_depth=2)
    assert out.path.equal(torch.tensor([[0, 1, 4]]))
    assert out.acceptance.tokens.equal(torch.tensor([[10, 13, 16]]))


def test_missing_nodes_and_repeated_siblings_are_never_taken_twice() -> None:
    """Nodes of -1 do not exist; of two equal siblings the first one is the child."""
    tree = tree_of([[9, 3, 3, -1, 4, -1, -1, -1]])
    out = accept_rows([row(params(temperature=0.0))], tree, one_hot_logits([3, 4, 5, 0, 6, 0, 0, 0]))
    assert out.path.equal(torch.tensor([[0, 1, 4, -1]]))
    assert out.acceptance.tokens.equal(torch.tensor([[3, 4, 6, -1]]))


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_as_a_tree_is_accepted_like_the_chain(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = [row(params(seed=seed, top_p=0.9, presence_penalty=0.5), choice=i) for i in range(20)]
    drafts = torch.randint(0, V, (20, 3), generator=generator)
    logits = torch.randn(80, V, generator=generator)
    plan = plan_of(states, [3] * 20)
    batch, info = sampling_batch(plan, V, CPU), info_of(plan)
    expected = accept(TargetOutput(logits=logits), DraftTokens(tokens=drafts), plan, info, batch)
    tree = tree_of([[0, *map(int, d)] for d in drafts], (-1, 0, 1, 2), (0, 1, 2, 3))
    out = accept_rows(states, tree, logits).acceptance
    for field in ("tokens", "num_accepted", "next_token", "last_row"):
        assert getattr(out, field).equal(getattr(expected, field)), field
    assert int(expected.num_accepted.max()) > 0


def test_every_node_is_processed_with_the_tokens_above_it() -> None:
    """Penalties, banned sequences and min_tokens at each node equal plain decoding of that path."""
    prompt, output = [5, 1], [3, 3]
    p = params(
        presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2,
        bad_words_ids=((2, 4), (3, 1, 2), (1, 1)), min_tokens=4, logit_bias=((5, 1.0),),
    )  # fmt: skip
    state = row(p, prompt=prompt, output=output, eos=(0,))
    tokens = [3, 1, 2, 3, 2, 1, 2, 4]
    tree = tree_of([tokens])
    plan = plan_of([state], [NUM_NODES - 1])
    logits = torch.randn(NUM_NODES, V, generator=torch.Generator().manual_seed(2))
    out = process(logits, tree.tokens[:, 1:], tree_batch(sampling_batch(plan, V, CPU), tree))
    for node in range(NUM_NODES):
        path, here = [], node
        while here > 0:
            path.append(tokens[here])
            here = PARENTS[here]
        later = plan_of([advance(state, prompt, [*output, *reversed(path)])], [0])
        empty = torch.empty(1, 0, dtype=torch.int64)
        alone = process(logits[node : node + 1], empty, sampling_batch(later, V, CPU))
        assert torch.equal(out[node], alone[0]), node


def test_a_broken_node_fails_its_row_only_when_it_is_on_the_path() -> None:
    tree = tree_of([[9 + node for node in range(NUM_NODES)]] * 2)
    logits = torch.cat([one_hot_logits(SCRIPTS[4][0])] * 2)
    logits[2] = math.nan  # a sibling of row 0's path
    logits[NUM_NODES + 4] = math.nan  # on row 1's path
    out = accept_rows([row(params(temperature=0.0))] * 2, tree, logits)
    assert out.acceptance.failed.equal(torch.tensor([False, True]))
    assert out.acceptance.tokens[0].equal(torch.tensor([10, 13, 16, 4]))
    assert out.path[1].equal(torch.tensor([0, -1, -1, -1]))
    assert bool((out.acceptance.tokens[1] == -1).all())


def test_logprobs_follow_the_path() -> None:
    tree = tree_of([[9 + node for node in range(NUM_NODES)]])
    logits = one_hot_logits(SCRIPTS[4][0]) * 0.1
    out = accept_rows([row(params(top_k=1, logprobs=1))], tree, logits).acceptance
    raw = logits.log_softmax(-1)
    assert out.logprobs is not None
    assert out.top_ids is not None
    torch.testing.assert_close(out.logprobs[0], torch.stack([raw[0, 10], raw[1, 13], raw[4, 16], raw[7, 4]]))
    assert out.top_ids[0, :, 0].equal(torch.tensor([10, 13, 16, 4]))


# ---- distributions

NUM_ROWS = 20_000
ROUNDS = 3


@functools.cache
def world() -> tuple[StepPlan, SamplingBatch]:
    plan = plan_of([row(params())] * NUM_ROWS, [NUM_NODES - 1] * NUM_ROWS)
    return plan, sampling_batch(plan, V, CPU)


def top_children(q: torch.Tensor) -> list[int]:
    """Node tokens of the test's tree: the draft's best tokens after each node."""
    tokens = [0] * NUM_NODES
    for node in range(1, NUM_NODES):
        parent = PARENTS[node]
        rank = sum(PARENTS[other] == parent for other in range(1, node))
        tokens[node] = int(q[V if parent == 0 else tokens[parent]].argsort(descending=True)[rank])
    return tokens


def first_two(kind: str, rule: str, *, spoil: bool = False, repeat: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Counts of the first token, and of the pair where the first step kept a node; p is the toy target's table."""
    p, q = tables(kind)
    tokens = top_children(q)
    if repeat:  # an equal sibling: trying it again would count its probability twice
        tokens[2] = tokens[1]
    if spoil:  # a lossy tree: nodes are taken whatever the target draws
        p = torch.where(p >= p.sort(-1, descending=True).values[:, 1:2], p * 1.5, p)
        p = p / p.sum(-1, keepdim=True)
    after = torch.tensor([V, *tokens[1:]])
    plan, base = world()
    tree = tree_of([tokens] * NUM_ROWS)
    logits = p[after].log().repeat(NUM_ROWS, 1)
    firsts, pairs = np.zeros(V), np.zeros((V, V))
    for round_ in range(ROUNDS):
        seeds = torch.from_numpy(np.random.default_rng(round_).integers(-(2**63), 2**63, NUM_ROWS))
        batch = tree_batch(dataclasses.replace(base, keys=seeds[base.sequence]), tree)
        out = accept_tree(TargetOutput(logits=logits), tree, info_of(plan), batch, max_depth=3, rule=rule).acceptance
        first, second = out.tokens[:, 0].numpy(), out.tokens[:, 1].numpy()
        np.add.at(firsts, first, 1)
        np.add.at(pairs, (first[second >= 0], second[second >= 0]), 1)
    return firsts, pairs


@pytest.mark.parametrize("rule", list(TREE_RULES))
@pytest.mark.parametrize("kind", ["random", "zeros in p", "disjoint", "one-hot p"])
def test_tree_rules_have_the_targets_distribution(kind: str, rule: str) -> None:
    p, _ = (table.double().numpy() for table in tables(kind))
    firsts, pairs = first_two(kind, rule)
    assert goodness(firsts, p[V]) > ALPHA
    for token in range(V):  # given that a child was kept, what follows it is drawn from p after it
        if pairs[token].sum() >= 100:
            assert goodness(pairs[token], p[token]) > ALPHA
    assert kind == "disjoint" or pairs.sum() > 1000


@pytest.mark.parametrize("rule", list(TREE_RULES))
def test_repeated_siblings_do_not_change_the_distribution(rule: str) -> None:
    p, _ = (table.double().numpy() for table in tables("random"))
    firsts, _ = first_two("random", rule, repeat=True)
    assert goodness(firsts, p[V]) > ALPHA


def test_the_tree_distribution_test_can_fail() -> None:
    p, _ = (table.double().numpy() for table in tables("random"))
    firsts, _ = first_two("random", "exact", spoil=True)
    assert goodness(firsts, p[V]) < ALPHA


# ---- compaction


def test_compaction_makes_the_path_a_dense_chain() -> None:
    """Two rows on pages of 4: after compaction the slots after the prefix hold root, then the kept nodes' KV."""
    prefix, kv_len = 3, 3 + NUM_NODES
    info = batch_info(
        query_lens=np.full(2, NUM_NODES, np.int32),
        kv_lens=np.full(2, kv_len, np.int32),
        page_indptr=indptr(np.full(2, 3, np.int32)),
        page_indices=np.asarray([5, 0, 3, 1, 4, 2], np.int32),
        slots=np.arange(2, dtype=np.int32),
        page_size=4,
        device=CPU,
    )
    kv = PagedKV(num_layers=2, num_pages=6, page_size=4, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=CPU)
    for layer in kv.layers:
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in kv.layers]
    path = torch.tensor([[0, 3, 6, -1], [0, 1, 4, 7]])
    kv.compact(*compaction_slots(path, info))
    for row_, nodes in enumerate([[0, 3, 6, 3], [0, 1, 4, 7]]):  # past the end of row 0's path slot 3 keeps its own
        pages = info.kv_indices_cpu[3 * row_ : 3 * row_ + 3]
        for depth, node in enumerate(nodes):
            to, source = prefix + depth, prefix + node
            for layer, old in zip(kv.layers, before, strict=True):
                assert torch.equal(layer[pages[to // 4], :, to % 4], old[pages[source // 4], :, source % 4])
        for position in range(prefix):
            assert torch.equal(kv.layers[0][pages[0], :, position], before[0][pages[0], :, position])
