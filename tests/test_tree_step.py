"""A step that verifies token trees, end to end at the level of functions: batch, forward, acceptance, compaction.

The tree's drafts are scripted: one path of it carries what plain decoding emits, for a number of tokens that differs
from row to row and step to step; all other nodes carry other tokens. So every step must keep exactly that much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specd.kv import PagedKV
from specd.models.llama import Llama
from specd.request import SamplingParams
from specd.sampling.batch import sampling_batch
from specd.sampling.chain import accept
from specd.sampling.tree import TreeAcceptance, accept_tree, compaction_slots, tree_batch
from specd.step import indptr
from specd.tensors import BatchInfo, DraftTokens, TargetOutput, TokenTree, batch_info, with_tree
from tests.sampling_plans import CPU, params, plan_of, row
from tests.tiny import make_kv, tiny_llama

# 0 is the root; 1, 2, 3 its children; 4, 5 below 1; 6 below 3; 7 below 4; 8 below 7
PARENTS = (-1, 0, 0, 0, 1, 1, 3, 4, 7)
DEPTHS = (0, 1, 1, 1, 2, 2, 2, 3, 4)
NUM_NODES, MAX_DEPTH = len(PARENTS), max(DEPTHS)
PATHS = ((1, 4, 7, 8), (2,), (3, 6), (1, 5))  # root to leaf
PROMPTS = ([5, 9, 2, 44, 17], [7] * 3 + list(range(20, 40)), [1], [60, 3, 3, 60, 3, 3, 60, 3])
NUM_PAGE_SLOTS = 80  # per row: more than prompt, output and one tree need

Change = Callable[[Any], Any]


@dataclasses.dataclass
class Run:
    """Rows that decode together on one model and KV. tokens[b][-1] is the root, everything before it is in the KV."""

    model: Llama
    sampling: list[SamplingParams]
    page_size: int
    tokens: list[list[int]] = dataclasses.field(default_factory=lambda: [list(prompt) for prompt in PROMPTS])

    def __post_init__(self) -> None:
        self.pages_per_row = -(-NUM_PAGE_SLOTS // self.page_size)
        num_pages = self.pages_per_row * len(PROMPTS)
        self.kv: PagedKV = make_kv(self.model, num_pages=num_pages, page_size=self.page_size)
        self.pages = np.random.default_rng(3).permutation(num_pages).astype(np.int32)  # no row's pages are neighbours
        with torch.inference_mode():
            known = [tokens[:-1] for tokens in self.tokens]
            flat = torch.tensor([token for row_tokens in known for token in row_tokens])
            self.model.forward(flat, self.info([len(k) for k in known], [len(k) for k in known]), self.kv)

    def info(self, query_lens: list[int], kv_lens: list[int], *, tree: TokenTree | None = None) -> BatchInfo:
        return batch_info(
            query_lens=np.asarray(query_lens, np.int32),
            kv_lens=np.asarray(kv_lens, np.int32),
            page_indptr=indptr(np.full(len(query_lens), self.pages_per_row, np.int32)),
            page_indices=self.pages,
            slots=np.arange(len(query_lens), dtype=np.int32),
            page_size=self.page_size,
            device=CPU,
            tree=tree,
        )

    def states(self) -> list[Any]:
        return [
            row(p, prompt=prompt, output=tokens[len(prompt) :])
            for p, prompt, tokens in zip(self.sampling, PROMPTS, self.tokens, strict=True)
        ]

    def plain_step(self) -> None:
        with torch.inference_mode():
            lens = [len(tokens) for tokens in self.tokens]
            info = self.info([1] * len(lens), lens)
            hidden, _ = self.model.forward(torch.tensor([tokens[-1] for tokens in self.tokens]), info, self.kv)
            plan = plan_of(self.states(), [0] * len(lens))
            output = TargetOutput(logits=self.model.logits(hidden))
            none = DraftTokens(tokens=torch.empty((len(lens), 0), dtype=torch.int64))
            out = accept(output, none, plan, info, sampling_batch(plan, output.logits.shape[-1], CPU))
        for tokens, token in zip(self.tokens, out.next_token.tolist(), strict=True):
            tokens.append(token)

    def tree_step(
        self, tree: TokenTree, *, change_info: Change = lambda info: info, compacts: bool = True
    ) -> TreeAcceptance:
        """One step on a tree per row. change_info: what a faulty implementation would give the forward instead."""
        with torch.inference_mode():
            rows = len(self.tokens)
            info = self.info([NUM_NODES] * rows, [len(tokens) - 1 + NUM_NODES for tokens in self.tokens], tree=tree)
            hidden, _ = self.model.forward(tree.tokens.flatten(), change_info(info), self.kv)
            output = TargetOutput(logits=self.model.logits(hidden))
            plan = plan_of(self.states(), [NUM_NODES - 1] * rows)
            sampling = tree_batch(sampling_batch(plan, output.logits.shape[-1], CPU), tree)
            out = accept_tree(output, tree, info, sampling, max_depth=MAX_DEPTH)
            if compacts:
                self.kv.compact(*compaction_slots(out.path, info))
        for tokens, emitted in zip(self.tokens, out.acceptance.tokens.tolist(), strict=True):
            tokens += [token for token in emitted if token >= 0]
        return out

    def slots(self, row_: int, length: int) -> list[torch.Tensor]:
        """Keys and values of a row's first `length` slots, a tensor per layer."""
        pages = torch.from_numpy(self.pages[row_ * self.pages_per_row : (row_ + 1) * self.pages_per_row]).long()
        return [layer[pages].transpose(0, 1).flatten(1, 2)[:, :length] for layer in self.kv.layers]


def sampled(temperature: float) -> list[SamplingParams]:
    seeds = range(len(PROMPTS))
    return [params(temperature=temperature, top_k=20 if temperature else 0, seed=seed) for seed in seeds]


def script(run: Run, expected: list[list[int]], step: int) -> tuple[TokenTree, list[list[int]]]:
    """The step's tree, and the nodes of each row that must be kept."""
    vocab = run.model.shape.vocab_size
    nodes, kept = [], []
    for row_, tokens in enumerate(run.tokens):
        path = PATHS[(row_ + step) % len(PATHS)]
        right = expected[row_][len(tokens) :][: MAX_DEPTH - (2 * row_ + step) % (MAX_DEPTH + 1)]
        kept.append([node for node, _ in zip(path, right, strict=False)])
        # Wrong on purpose: what plain decoding does not emit at that depth, and siblings all different.
        wrong = [
            (expected[row_][len(tokens) - 1 + depth] + node + 1) % vocab if node else tokens[-1]
            for node, depth in enumerate(DEPTHS)
        ]
        nodes.append([right[kept[-1].index(node)] if node in kept[-1] else wrong[node] for node in range(NUM_NODES)])
    shape = (len(nodes), -1)
    parents, depths = torch.tensor(PARENTS).expand(shape), torch.tensor(DEPTHS).expand(shape)
    return TokenTree(tokens=torch.tensor(nodes), parents=parents, depths=depths), kept


def plain(model: Llama, sampling: list[SamplingParams], page_size: int) -> Run:
    run = Run(model, sampling, page_size)
    for _ in range(40):
        run.plain_step()
    return run


def kv_error(run: Run, reference: Run) -> float:
    """Largest difference of any slot that holds KV of an emitted token's predecessor."""
    worst = 0.0
    for row_, tokens in enumerate(run.tokens):
        pairs = zip(run.slots(row_, len(tokens) - 1), reference.slots(row_, len(tokens) - 1), strict=True)
        worst = max(worst, *(float((own - other).abs().max()) for own, other in pairs))
    return worst


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tree_steps_equal_plain_decoding(temperature: float, page_size: int) -> None:
    """Tokens and KV after each of six steps; greedy and seeded; prefixes of 0 to 22 tokens in one batch."""
    model, sampling = tiny_llama(), sampled(temperature)
    reference = plain(model, sampling, page_size)
    run = Run(model, sampling, page_size)
    accepted = set()
    for step in range(6):
        tree, kept = script(run, reference.tokens, step)
        out = run.tree_step(tree)
        assert [[node for node in path[1:] if node >= 0] for path in out.path.tolist()] == kept, step
        accepted |= set(out.acceptance.num_accepted.tolist())
        for own, other in zip(run.tokens, reference.tokens, strict=True):
            assert own == other[: len(own)], step
        assert kv_error(run, reference) < 1e-5, step
    assert accepted == set(range(MAX_DEPTH + 1)), "every path length was met"


def test_plain_steps_follow_tree_steps() -> None:
    """The sequence is a dense chain again: stages that know nothing of trees go on with it."""
    model, sampling = tiny_llama(), sampled(1.0)
    reference = plain(model, sampling, 4)
    run = Run(model, sampling, 4)
    run.tree_step(script(run, reference.tokens, 1)[0])
    for _ in range(3):
        run.plain_step()
    run.tree_step(script(run, reference.tokens, 2)[0])
    for own, other in zip(run.tokens, reference.tokens, strict=True):
        assert own == other[: len(own)]
    assert kv_error(run, reference) < 1e-5


def as_chain(info: BatchInfo) -> BatchInfo:
    """A causal mask over the block instead of the tree's."""
    return dataclasses.replace(info, tree=None)


def as_star(info: BatchInfo) -> BatchInfo:
    """Nodes see the root and themselves alone."""
    assert info.tree is not None
    parents = torch.where(info.tree.parents > 0, 0, info.tree.parents)
    return dataclasses.replace(info, tree=dataclasses.replace(info.tree, parents=parents))


def with_chain_positions(info: BatchInfo) -> BatchInfo:
    roots = info.positions.view(-1, NUM_NODES)[:, :1]
    return dataclasses.replace(info, positions=(roots + torch.arange(NUM_NODES)).flatten())


@pytest.mark.parametrize(
    "fault",
    [
        {"change_info": as_chain},
        {"change_info": as_star},
        {"change_info": with_chain_positions},
        {"compacts": False},
    ],
    ids=["chain mask", "star mask", "chain positions", "no compaction"],
)
def test_a_fault_shows(fault: dict[str, Any]) -> None:
    """Negative controls: the checks above see each of these in the KV within a step, in the tokens within a few."""
    model, sampling = tiny_llama(), sampled(1.0)
    reference = plain(model, sampling, 4)
    run = Run(model, sampling, 4)
    run.tree_step(script(run, reference.tokens, 1)[0], **fault)
    assert kv_error(run, reference) > 1e-2
    for step in range(2, 6):
        if all(own == other[: len(own)] for own, other in zip(run.tokens, reference.tokens, strict=True)):
            run.tree_step(script(run, reference.tokens, step)[0], **fault)
    assert any(own != other[: len(own)] for own, other in zip(run.tokens, reference.tokens, strict=True))


def test_positions_follow_depth_and_slots_do_not() -> None:
    run = Run(tiny_llama(), sampled(0.0), 4)
    tree, _ = script(run, [tokens + [0] * 40 for tokens in run.tokens], 0)
    lens = [len(tokens) - 1 + NUM_NODES for tokens in run.tokens]
    chain = run.info([NUM_NODES] * len(lens), lens)
    info = with_tree(chain, tree)
    for row_, prompt in enumerate(PROMPTS):
        own = slice(row_ * NUM_NODES, (row_ + 1) * NUM_NODES)
        assert info.positions[own].tolist() == [len(prompt) - 1 + depth for depth in DEPTHS]
    assert info.write_slots.equal(chain.write_slots)
    assert len(set(info.write_slots.tolist())) == info.num_tokens
    assert info.tree is tree
    with pytest.raises(AssertionError):
        with_tree(run.info([NUM_NODES - 1] * len(lens), lens), tree)
