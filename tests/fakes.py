"""Models without weights whose output shows every mistake: wrong KV, wrong position, wrong page, wrong pair.

The successor rule: the next token is a function of a rolling hash over *all* tokens before it, and the model reads them
back through the page table. One wrong, stale or misplaced slot changes everything that follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from specd.drafters.base import Drafter
from specd.kv import PagedKV
from specd.models.base import ModelShape
from specd.sampling.logprobs import top_tokens
from specd.step import DraftTraits, RefillMode
from specd.tensors import BatchInfo, BestTokens, DraftState, TopTokens

CPU = torch.device("cpu")
VOCAB = 97
_SIDE = 251  # hashes are two digits to this base: each is exact in bf16, which stores features
_MODULUS = _SIDE * _SIDE
FEATURES = 4  # hash (two digits), position, next token


class PoisonError(RuntimeError):
    """What a model raises for a marked token."""


def extend_hash(value: int, token: int) -> int:
    return (value * 31 + token + 1) % _MODULUS


def hash_of(tokens: Sequence[int]) -> int:
    value = 7
    for token in tokens:
        value = extend_hash(value, token)
    return value


def successor(value: int) -> int:
    """The token that follows a context with this hash; never one of the first five, which tests use as marks."""
    return 5 + (value * 2654435761 >> 7) % (VOCAB - 5)


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Plain decoding by the rule."""
    value, out = hash_of(prompt), []
    for _ in range(num_tokens):
        out.append(successor(value))
        value = extend_hash(value, out[-1])
    return out


def feature(tokens: Sequence[int]) -> list[int]:
    """The hidden state after these tokens."""
    value = hash_of(tokens)
    return [value // _SIDE, value % _SIDE, (len(tokens) - 1) % _SIDE, successor(value)]


def one_hot_logits(tokens: Sequence[int]) -> torch.Tensor:
    """f32[B, VOCAB] with a clear maximum, and an order among the rest."""
    return -torch.tensor([[abs(i - token) / 8 for i in range(VOCAB)] for token in tokens]).reshape(-1, VOCAB)


def row_slots(batch: BatchInfo, row: int, length: int) -> list[int]:
    """Flat slots of a row's first `length` positions."""
    pages = batch.kv_indices_cpu[batch.kv_indptr_cpu[row] : batch.kv_indptr_cpu[row + 1]].tolist()
    return [pages[i // batch.page_size] * batch.page_size + i % batch.page_size for i in range(length)]


class SuccessorModel:
    """The rule as a `specd.models.base.Model`. A slot's key holds the token, its value the position.

    raises_on: a forward over this token raises PoisonError. nan_on: hidden states after this token are NaN.
    lies: positions at which another token is predicted: the model as a draft that is wrong on purpose.
    """

    dtype = torch.float32
    device = CPU

    def __init__(
        self,
        *,
        raises_on: int | None = None,
        nan_on: int | None = None,
        lies: Callable[[int], bool] = lambda position: False,
        max_position: int = 4096,
    ) -> None:
        self.shape = ModelShape(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            hidden_size=FEATURES,
            vocab_size=VOCAB,
            max_position=max_position,
        )
        self.highest_position = -1
        self._raises_on = raises_on
        self._nan_on = nan_on
        self._lies = lies

    def prepare(self, batch: BatchInfo) -> BatchInfo:
        return batch

    def forward(
        self, tokens: torch.Tensor, batch: BatchInfo, kv: PagedKV, *, features: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = tokens.tolist()
        if self._raises_on in given:
            raise PoisonError(f"token {self._raises_on}")
        kv.append(0, batch, tokens[:, None, None].float(), batch.positions[:, None, None].float())
        hidden: list[list[float]] = []
        for row, (query_len, kv_len) in enumerate(zip(batch.query_lens_cpu, batch.kv_lens_cpu, strict=True)):
            seen = self._read(kv, row_slots(batch, row, int(kv_len)))
            hidden += [self._hidden(seen[: kv_len - query_len + i + 1]) for i in range(query_len)]
        out = torch.tensor(hidden)
        self.highest_position = max([self.highest_position, *batch.positions.tolist()])
        return out, out if features is not None else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = one_hot_logits(hidden[:, 3].nan_to_num(0.0).long().tolist())
        return out.masked_fill(hidden[:, 3:].isnan(), float("nan"))

    def best(self, hidden: torch.Tensor) -> BestTokens:
        return BestTokens(*self.logits(hidden).max(-1))

    def top(self, hidden: torch.Tensor, k: int) -> TopTokens:
        return top_tokens(self.logits(hidden), k)

    def weight_bytes(self) -> int:
        return 0

    def _read(self, kv: PagedKV, slots: list[int]) -> list[int]:
        """Tokens at these slots; a slot that was written for another position gives a token that does not exist."""
        flat = torch.tensor(slots)
        cells = kv.layers[0][flat // kv.page_size, :, flat % kv.page_size, 0, 0]  # [S, 2]
        return [int(token) if position == i else 1000 + i for i, (token, position) in enumerate(cells.tolist())]

    def _hidden(self, seen: list[int]) -> list[float]:
        if self._nan_on in seen:
            return [float("nan")] * FEATURES
        values = feature(seen)
        if self._lies(len(seen) - 1):
            values[3] = 5 + (values[3] - 4) % (VOCAB - 5)
        return [float(value) for value in values]


class HeadDrafter:
    """A drafter that reads the target's last hidden states (as MTP and EAGLE do) and keeps what it was given.

    Slot i must hold the pair (h_i, t_i+1): `pairs` gives what is there. From a pair the rule tells t_i+2, so a correct
    pipeline keeps every draft, but for those at positions where `lies` is true. Its state after a pair is the pair's
    hash: an `extend` with a wrong hidden state, token or position shows as a wrong draft.
    """

    vocab_size = VOCAB

    def __init__(
        self,
        mode: RefillMode,
        *,
        lies: Callable[[int], bool] = lambda position: False,
        max_depth: int = 8,
    ) -> None:
        self.traits = DraftTraits(
            name="head", max_depth=max_depth, refill_mode=mode, shifted=True, features="last", leader_only=False
        )
        self.num_refills = 0
        self._lies = lies
        self._data = torch.zeros(0)
        self._page_size = 0

    def make_carry(self, num_slots: int) -> DraftState:
        return DraftState.of(torch.zeros((num_slots, VOCAB)), torch.zeros((num_slots, FEATURES)))

    def kv_bytes_per_page(self, page_size: int) -> int:
        return (FEATURES + 1) * 4 * page_size

    def allocate(self, *, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._data = torch.full((num_pages, page_size, FEATURES + 1), -1.0)

    def extend(self, tokens: torch.Tensor, state: DraftState, batch: BatchInfo, *, logits: bool) -> DraftState:
        assert state.hidden is not None
        self._write(batch, state.hidden, tokens)
        return self._predict(state.hidden, tokens, logits)

    def refill(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor | None,
        batch: BatchInfo,
        last_rows: torch.Tensor,
        *,
        logits: bool,
    ) -> DraftState:
        assert features is not None
        assert int(tokens.min()) >= 0, "a token that does not exist would be embedded"
        self.num_refills += 1
        self._write(batch, features, tokens)
        return self._predict(features[last_rows].float(), tokens[last_rows], logits)

    def pairs(self, pages: Sequence[int], length: int) -> list[tuple[list[int], int]]:
        """(features, token) of the first `length` slots of a page list."""
        rows = self._data[list(pages)].flatten(0, 1)[:length].tolist()
        return [([int(value) for value in row[:FEATURES]], int(row[FEATURES])) for row in rows]

    def _write(self, batch: BatchInfo, features: torch.Tensor, tokens: torch.Tensor) -> None:
        own = features[:, 2].isnan() | (features[:, 2].float() == batch.positions % _SIDE)
        assert own.all(), "a hidden state at another position than its own"
        slots = batch.write_slots
        cells = torch.cat([features.float(), tokens[:, None].float()], dim=1)
        self._data[slots // self._page_size, slots % self._page_size] = cells

    def _predict(self, hidden: torch.Tensor, tokens: torch.Tensor, logits: bool) -> DraftState:
        guesses, states = [], []
        for (high, low, position, _), token in zip(hidden.long().tolist(), tokens.tolist(), strict=True):
            value = extend_hash(high * _SIDE + low, token)
            guess = successor(value)
            if self._lies(position + 1):
                guess = 5 + (guess - 4) % (VOCAB - 5)
            guesses.append(guess)
            states.append([value // _SIDE, value % _SIDE, (position + 1) % _SIDE, guess])
        fed_back = torch.tensor(states).float().reshape(-1, FEATURES)
        if logits:
            return DraftState.of(one_hot_logits(guesses), fed_back)
        return DraftState(torch.tensor(guesses, dtype=torch.int64), hidden=fed_back)


class MatrixHead:
    """A head of one matrix, on any device: hidden states and tokens in, hidden states and logits out."""

    def __init__(self, vocab_size: int, hidden_size: int, device: torch.device) -> None:
        self.traits = DraftTraits(
            name="head", max_depth=4, refill_mode=RefillMode.PADDED, shifted=True, features="last", leader_only=False
        )
        self.vocab_size = vocab_size
        self._weight = torch.zeros((vocab_size, hidden_size), device=device)

    def make_carry(self, num_slots: int) -> DraftState:
        width = self._weight.shape[1]
        return DraftState.of(
            self._weight.new_zeros((num_slots, self.vocab_size)), self._weight.new_zeros((num_slots, width))
        )

    def kv_bytes_per_page(self, page_size: int) -> int:
        return 0

    def allocate(self, *, num_pages: int, page_size: int) -> None:
        return

    def extend(self, tokens: torch.Tensor, state: DraftState, batch: BatchInfo, *, logits: bool) -> DraftState:
        assert state.hidden is not None
        return self._mix(tokens, state.hidden, logits)

    def refill(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor | None,
        batch: BatchInfo,
        last_rows: torch.Tensor,
        *,
        logits: bool,
    ) -> DraftState:
        assert features is not None
        return self._mix(tokens[last_rows], features.float()[last_rows], logits)

    def _mix(self, tokens: torch.Tensor, hidden: torch.Tensor, logits: bool) -> DraftState:
        mixed = hidden + self._weight[tokens]
        state = DraftState.of(mixed @ self._weight.T, mixed)
        return state if logits else dataclasses.replace(state, logits=None)


@dataclasses.dataclass(slots=True)
class Failures:
    """Which calls fail: 0-based numbers of `extend` and `refill` calls, or every one from a number on."""

    extends: frozenset[int] = frozenset()
    refills: frozenset[int] = frozenset()
    all_refills_from: int | None = None


class FailingDrafter:
    """Another drafter whose calls fail on demand, after they have written junk."""

    def __init__(self, inner: Drafter, failures: Failures) -> None:
        self.traits = inner.traits
        self.vocab_size = inner.vocab_size
        self.num_extends = self.num_refills = 0
        self._inner = inner
        self._failures = failures

    def make_carry(self, num_slots: int) -> DraftState:
        return self._inner.make_carry(num_slots)

    def kv_bytes_per_page(self, page_size: int) -> int:
        return self._inner.kv_bytes_per_page(page_size)

    def allocate(self, *, num_pages: int, page_size: int) -> None:
        self._inner.allocate(num_pages=num_pages, page_size=page_size)

    def extend(self, tokens: torch.Tensor, state: DraftState, batch: BatchInfo, *, logits: bool) -> DraftState:
        call, self.num_extends = self.num_extends, self.num_extends + 1
        if call in self._failures.extends:
            self._inner.extend(torch.full_like(tokens, 3), state, batch, logits=logits)
            raise PoisonError(f"extend {call}")
        return self._inner.extend(tokens, state, batch, logits=logits)

    def refill(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor | None,
        batch: BatchInfo,
        last_rows: torch.Tensor,
        *,
        logits: bool,
    ) -> DraftState:
        call, self.num_refills = self.num_refills, self.num_refills + 1
        first = self._failures.all_refills_from
        if call in self._failures.refills or (first is not None and call >= first):
            self._inner.refill(torch.full_like(tokens, 3), features, batch, last_rows, logits=logits)
            raise PoisonError(f"refill {call}")
        return self._inner.refill(tokens, features, batch, last_rows, logits=logits)
