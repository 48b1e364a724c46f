"""What must hold of the scheduler, its pages and their content: before a launch, between two steps, at the end."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from specd.pipeline.plan import Row, ScheduledStep
from specd.request import FinishReason
from specd.sequence import Phase, Sequence
from specd.step import DraftSource, Refill

if TYPE_CHECKING:
    from tests.schedule_world import World


def link(*parts: int) -> int:
    return hash(parts)


def chain(tokens: Items[int]) -> list[int]:
    """Content of the target's (and an LM draft's) KV slot at each position."""
    out, content = [], 0
    for token in tokens:
        content = link(content, token)
        out.append(content)
    return out


def head_chain(tokens: Items[int]) -> list[int]:
    """Content of a head's KV slot i: (feature of i, token i + 1) on top of slot i - 1. One shorter than tokens."""
    out, content = [], 0
    for feature, token in zip(chain(tokens), tokens[1:], strict=False):
        content = link(content, feature, token)
        out.append(content)
    return out


def truth(world: World, tokens: Items[int]) -> list[int]:
    """What the drafter's KV slots hold."""
    return head_chain(tokens) if world.shifted else chain(tokens)


def check_plan(world: World, scheduled: ScheduledStep) -> None:
    """A plan before it is launched: budgets, rights, and that every slot it can touch is owned."""
    plan, limits = scheduled.plan, world.scheduler.limits
    sequences = [row.sequence for row in scheduled.rows]
    assert plan.num_tokens <= limits.max_tokens
    assert len({id(s) for s in sequences}) == len(sequences) <= limits.max_running
    assert all(s in sequences for s in world.scheduler.running if s.decoding), "a decode row was starved"
    assert int(plan.refill_indptr[-1]) <= limits.max_tokens
    if limits.mixed == "plain" and not all(s.decoding for s in sequences):
        assert plan.max_drafts == 0
    traits = world.scheduler.traits
    for i, (row, sequence) in enumerate(zip(scheduled.rows, sequences, strict=True)):
        assert sequence.phase is Phase.RUNNING
        assert plan.pages(i).tolist() == list(sequence.pages)
        assert plan.kv_lens[i] == sequence.num_computed + plan.query_lens[i]
        assert row.num_known >= 1
        assert row.emits == (sequence.num_computed + row.num_known == len(sequence.tokens))
        assert plan.kv_lens[i] + world.extra <= len(sequence.pages) * plan.page_size, "a slot has no page"
        assert sequence.num_computed // plan.page_size >= sequence.num_published
        if row.num_drafts:
            assert sequence.decoding
            assert row.num_drafts <= min(sequence.max_draft, sequence.limit - len(sequence.tokens) - 1)
        if row.source == DraftSource.DRAFTER:
            assert traits is not None
            assert sequence.carry_valid
        if traits is not None and traits.max_context is not None:
            drafting = row.source == DraftSource.DRAFTER and row.num_drafts > 0
            reach = len(sequence.tokens) + row.num_drafts + world.extra
            assert reach <= traits.max_context or not (drafting or row.refill), "beyond the drafter's context"
        assert row.refill != Refill.NEWEST or row.emits


def check(world: World) -> None:
    """Between two steps."""
    world.pool.check()
    running, waiting = world.scheduler.running, list(world.scheduler.waiting)
    owned = [page for sequence in running for page in sequence.pages]
    for page in range(world.pool.num_pages):
        assert world.pool.refs(page) == owned.count(page), "a page's owners and its count disagree"
    slots = [sequence.slot for sequence in running] + world.scheduler._free_slots
    assert sorted(slots) == list(range(world.scheduler.limits.max_running))
    for sequence in waiting:
        assert sequence.phase is Phase.WAITING
        assert (len(sequence.pages), sequence.slot, sequence.num_computed, sequence.drafter_len) == (0, -1, 0, 0)
    for sequence in running:
        _check_sequence(world, sequence)
    _check_index(world)


def _check_sequence(world: World, sequence: Sequence) -> None:
    size, tokens = world.pool.page_size, sequence.tokens
    assert sequence.phase is Phase.RUNNING
    assert 0 <= sequence.num_computed < len(tokens) < sequence.limit
    assert sequence.drafter_len <= sequence.num_computed + world.extra
    assert world.shown.get(id(sequence), tokens) == tokens, "the proposer was not shown every token"
    for i, page in enumerate(sequence.pages):
        assert world.pool.refs(page) == 1 or i < sequence.num_published, "a shared page was never published"
    slots = [sequence.pages[i // size] * size + i % size for i in range(len(sequence.pages) * size)]
    found = [world.target.get(slot) for slot in slots[: sequence.num_computed]]
    assert found == chain(tokens)[: sequence.num_computed], "target KV"
    if world.refill_error or world.scheduler.traits is None:
        return  # marks are set back when the error is seen
    found = [world.drafter.get(slot) for slot in slots[: sequence.drafter_len]]
    assert found == truth(world, tokens)[: sequence.drafter_len], "drafter KV"
    if sequence.carry_valid:
        assert sequence.drafter_len == len(tokens) - 1 + world.extra
        assert world.carry[sequence.slot] == truth(world, tokens)[-1], "carry"


def _check_index(world: World) -> None:
    """Every page that a prefix can be found under holds that prefix, up to its marks."""
    size, lookahead = world.pool.page_size, int(world.shifted)
    for sequence in world.sequences:
        for i, key in enumerate(sequence.keys._keys):
            prefix = (sequence.request.cache_salt, tuple(sequence.tokens[: (i + 1) * size + lookahead]))
            assert world.key_tokens.setdefault(key, prefix) == prefix, "one key for two prefixes"
    for key, page in world.pool._index.items():
        _, tokens = world.key_tokens[key]
        block = range(len(tokens) - lookahead - size, len(tokens) - lookahead)
        found = [world.target.get(page * size + i % size) for i in block]
        assert found == [chain(tokens)[i] for i in block], "a published page's target KV"
        mark = world.pool.drafter_len([page])
        if mark and not world.refill_error and world.scheduler.traits is not None:
            found = [world.drafter.get(page * size + i) for i in range(mark)]
            assert found == [truth(world, tokens)[i] for i in block][:mark], "a published page's drafter KV"


def check_over(world: World) -> None:
    """After `run`: everything is said, and nothing is held."""
    for sequence in world.sequences:
        deltas = world.deltas[id(sequence)]
        assert sequence.phase is Phase.FINISHED
        assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        said = [token for delta in deltas for token in delta.token_ids]
        expected = world.expected(sequence)
        whole = deltas[-1].finish_reason in ("stop", "length")
        assert said == (expected if whole else expected[: len(said)])
        assert not sequence.pages
    assert not world.scheduler.running
    assert not world.scheduler.waiting
    assert world.pool.num_free == world.pool.num_pages
    assert sorted(world.scheduler._free_slots) == list(range(world.scheduler.limits.max_running))


def row_of(scheduled: ScheduledStep | None, sequence: Sequence) -> Row:
    assert scheduled is not None
    (row,) = [row for row in scheduled.rows if row.sequence is sequence]
    return row


def steps_of(world: World, sequence: Sequence) -> list[Row]:
    """Its row in each step that it took part in."""
    return [row for scheduled in world.history for row in scheduled.rows if row.sequence is sequence]


def run_until_decoding(world: World, sequence: Sequence) -> None:
    while not sequence.decoding:
        assert world.step()


def reason(world: World, sequence: Sequence) -> FinishReason | None:
    return world.deltas[id(sequence)][-1].finish_reason
