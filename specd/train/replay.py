"""Held-out sequences through the parts that serve: what a head says about each token of them, from each place.

    target    prefill in chunks: KV, states, features into their pages
    refill    the head over pairs 0..n-3 in chunks, features read from the pages, as an EXACT refill catches up
    extend    from every pair i at once, j = 1..depth-1: token t_{i+1+j} at position and slot i + j

A chain from pair i must find the slots 0..i as the refill left them and must not write where another chain reads. So
every chain is a row of its own, whose page table shares the whole pages before slot i + 1 and ends in pages of its own;
the page that slot i + 1 lies in is copied there. Draft tokens are those of the text (teacher-forced).

Legend: n tokens of a sequence, D depth, R pairs of a chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from specd.drafters.mtp import MtpDrafter
from specd.kv import PagedFeatures, PagedKV
from specd.models.base import Model
from specd.step import I32, indptr
from specd.tensors import BatchInfo, batch_info
from specd.train.held_out import HeldOut

_PAGE = 16  # tokens of a KV page, as served by default


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Table:
    """What was found of each pair i (column) and pass j (row), about the token at place i + 2 + j.

    A pass counts where valid: the model wrote that token.
    """

    valid: torch.Tensor  # bool[D, n - 2]
    divergence: torch.Tensor  # f64: KL of the target's distribution from the draft's, over what the draft can say
    overlap: torch.Tensor  # f64: sum of min(p, q)
    agreed: torch.Tensor  # bool: the draft's argmax is the target's
    right: torch.Tensor  # bool: so is the text's token
    kept: torch.Tensor  # f64: min(1, q / p) of the text's token

    @classmethod
    def empty(cls, depth: int, pairs: int) -> Table:
        flags = [torch.zeros(depth, pairs, dtype=torch.bool) for _ in range(3)]
        sums = [torch.zeros(depth, pairs, dtype=torch.float64) for _ in range(3)]
        return cls(flags[0], sums[0], sums[1], flags[1], flags[2], sums[2])


class Replay:
    """One sequence after the other through target and drafter, each from empty pages."""

    def __init__(
        self,
        model: Model,
        drafter: MtpDrafter,
        *,
        depth: int,
        longest: int,
        chunk_tokens: int,
        kv_dtype: torch.dtype,
    ) -> None:
        """longest: tokens of the longest sequence that will be replayed."""
        self._model, self._drafter = model, drafter
        self._depth, self._chunk = depth, chunk_tokens
        self._shared = longest // _PAGE + 1  # pages of the sequence
        self._own = -(-(depth - 1 + _PAGE - 1) // _PAGE) if depth > 1 else 0  # pages of a chain, wherever it begins
        shape, features = model.shape, drafter.traits.features
        self._kv = PagedKV(
            num_layers=shape.num_layers,
            num_pages=self._shared,
            page_size=_PAGE,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=kv_dtype,
            device=model.device,
        )
        self._features = PagedFeatures(
            num_pages=self._shared,
            page_size=_PAGE,
            width=shape.hidden_size * (3 if features == "aux" else 1),
            dtype=model.dtype,
            device=model.device,
        )
        drafter.allocate(num_pages=self._shared + self._own * chunk_tokens, page_size=_PAGE)

    @torch.inference_mode()
    def run(self, text: HeldOut) -> Table:
        """What the drafter says about every answer token of a sequence, from every pair before it."""
        states = self._states(text.ids[:-1])
        pairs = len(text.ids) - 2  # the last of them predicts the last token
        table = Table.empty(self._depth, pairs)
        for begin in range(0, pairs, self._chunk):
            self._chains(text, states, table, begin, min(begin + self._chunk, pairs))
        return table

    def _states(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n - 1, H] after the final norm; leaves the features in their pages."""
        states = []
        for begin in range(0, len(tokens), self._chunk):
            batch = self._prefill(begin, min(begin + self._chunk, len(tokens)))
            hidden, read = self._model.forward(
                tokens[begin : begin + self._chunk], batch, self._kv, features=self._drafter.traits.features
            )
            assert read is not None
            self._features.write(batch, read)
            states.append(hidden)
        return torch.cat(states)

    def _chains(self, text: HeldOut, states: torch.Tensor, table: Table, begin: int, end: int) -> None:
        """Refills the pairs begin..end-1 and drafts on from each; fills their columns of the table."""
        last = len(text.ids) - 2  # place of the last state that is compared with
        pairs = torch.arange(begin, end)
        places = pairs + 1 + torch.arange(self._depth)[:, None]  # [D, R] of the state that pass j is compared with
        wanted = (places <= last) & text.learned[places.clamp(max=last)]
        ahead = wanted.flip(0).int().cummax(0).values.flip(0).bool()  # by this pass or one after it
        chains = ahead[0].nonzero().flatten()  # those that are drafted, of the chunk
        batch = self._prefill(begin, end)
        read = self._features.read(batch.write_slots)
        state = self._drafter.refill(text.ids[begin + 1 : end + 1], read, batch, chains, logits=True)
        self._copy_pages(pairs)
        goal = Goal.of(self._model, states[begin + 1 : min(end + self._depth, last + 1)], first_place=begin + 1)
        for index in range(self._depth):
            going = ahead[index, chains].nonzero().flatten()
            chains, state = chains[going], state.rows(going)
            if not len(chains):
                return
            if index:
                tokens = text.ids[pairs[chains] + 1 + index]
                state = self._drafter.extend(tokens, state, self._chain_batch(pairs, chains, index), logits=True)
            now = wanted[index, chains].nonzero().flatten()
            if len(now):
                assert state.logits is not None
                chosen = chains[now]
                goal.compare(state.logits[now], places[index, chosen], text.ids, table, (index, pairs[chosen]))

    def _prefill(self, begin: int, end: int) -> BatchInfo:
        pages = np.arange(self._shared, dtype=np.int32)
        return self._batch(np.asarray([end - begin], np.int32), np.asarray([end], np.int32), [pages])

    def _chain_batch(self, pairs: torch.Tensor, chains: torch.Tensor, index: int) -> BatchInfo:
        """Pass `index` of some chains of the chunk whose pairs these are."""
        begins = pairs[chains]
        pages = [
            np.concatenate([np.arange(whole, dtype=np.int32), self._own_pages(chain)])
            for whole, chain in zip(((begins + 1) // _PAGE).tolist(), chains.tolist(), strict=True)
        ]
        return self._batch(np.ones(len(chains), np.int32), (begins + 1 + index).numpy().astype(np.int32), pages)

    def _own_pages(self, chain: int) -> I32:
        first = self._shared + chain * self._own
        return np.arange(first, first + self._own, dtype=np.int32)

    def _copy_pages(self, pairs: torch.Tensor) -> None:
        """The page that slot i + 1 of a chain lies in, to the chain's first own page."""
        if not self._own:
            return
        offsets = torch.arange(_PAGE)
        source = (pairs + 1) // _PAGE
        target = self._shared + torch.arange(len(pairs)) * self._own
        self._drafter.kv.compact(*((page[:, None] * _PAGE + offsets).flatten() for page in (source, target)))

    def _batch(self, query_lens: I32, kv_lens: I32, pages: Sequence[I32]) -> BatchInfo:
        return batch_info(
            query_lens=query_lens,
            kv_lens=kv_lens,
            page_indptr=indptr(np.asarray([len(part) for part in pages], np.int32)),
            page_indices=np.concatenate(pages),
            slots=np.arange(len(query_lens), dtype=np.int32),
            page_size=_PAGE,
            device=self._model.device,
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """The target's distributions after consecutive places of a sequence."""

    logp: torch.Tensor  # f32[places, V]
    best: torch.Tensor  # i64[places]
    first_place: int

    @classmethod
    def of(cls, model: Model, states: torch.Tensor, *, first_place: int) -> Goal:
        logits = model.logits(states).float()
        return cls(logits.log_softmax(-1), logits.argmax(-1), first_place)

    def compare(
        self,
        logits: torch.Tensor,
        places: torch.Tensor,
        ids: torch.Tensor,
        table: Table,
        cells: tuple[int, torch.Tensor],
    ) -> None:
        """Logits [R, V] about what follows `places` i64[R] of the sequence `ids`, into the table's (row, columns)."""
        at, following = places - self.first_place, ids[places + 1]
        vocabulary = logits[0].isfinite().nonzero().flatten()  # what the draft can say: the same in every row
        said = logits[:, vocabulary].float()
        norm = said.logsumexp(-1, keepdim=True)
        logp, logq = self.logp[at[:, None], vocabulary], said - norm
        p = logp.exp()
        share = p.sum(-1)
        ratio = logits.gather(-1, following[:, None]).float() - norm - self.logp[at[:, None], following[:, None]]
        table.valid[cells] = True
        table.divergence[cells] = ((p * (logp - logq)).sum(-1) / share - share.log()).double()
        table.overlap[cells] = torch.minimum(p, logq.exp()).sum(-1).double()
        table.agreed[cells] = logits.argmax(-1) == self.best[at]
        table.right[cells] = following == self.best[at]
        table.kept[cells] = ratio[:, 0].exp().clamp(max=1.0).double()
