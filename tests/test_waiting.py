"""The order of waiting: one key is a plain queue, several share by weight, and nothing starves whatever arrives."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from specd.pages import BlockKeys
from specd.pipeline.waiting import WaitingQueue, _Tenant
from specd.request import Request, SamplingParams
from specd.sequence import Sequence
from specd.text import Detokenizer
from tests.schedule_world import Letters

A, B, C = b"a", b"b", b"c"


def choices(
    name: str, size: int = 1, *, key: bytes = A, n: int = 1, priority: int = 0, weight: int = 1
) -> list[Sequence]:
    """The sequences of one request whose prompt has `size` tokens."""
    sampling = SamplingParams(max_tokens=4, seed=0)
    request = Request(name, (1,) * size, sampling, n=n, tenant=key, priority=priority, weight=weight)
    keys = BlockKeys(secret=b"s", salt=b"", page_size=4, lookahead=False)
    return [
        Sequence(
            request,
            index,
            eos_ids=(),
            max_len=1 << 20,
            max_draft=0,
            histogram_len=1,
            detokenizer=Detokenizer(Letters()),
            keys=keys,
        )
        for index in range(n)
    ]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fill(queue: WaitingQueue, *requests: list[Sequence]) -> None:
    for request in requests:
        for sequence in request:
            queue.add(sequence)


def names(queue: WaitingQueue) -> list[str]:
    return [f"{sequence.request.request_id}{sequence.index}" for sequence in queue]


def take_all(queue: WaitingQueue) -> Iterator[Sequence]:
    """One after the other, each time whoever is next."""
    while queue:
        sequence = next(iter(queue))
        queue.take(sequence)
        yield sequence


# ---------------------------------------------------------------- one key


class Deque:
    """What the order was before there were keys and priorities."""

    def __init__(self) -> None:
        self.items: collections.deque[Sequence] = collections.deque()

    def add(self, sequence: Sequence) -> None:
        self.items.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        self.items.appendleft(sequence)

    def drop(self, sequence: Sequence) -> None:
        self.items.remove(sequence)


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "remove", "preempt"]), st.integers(0, 30)), max_size=60))
def test_one_key_with_equal_priorities_is_first_come_first_served(rules: list[tuple[str, int]]) -> None:
    """After any history the whole order is a deque's; siblings that are passed over keep their place."""
    queue, model, running = WaitingQueue(), Deque(), collections.deque[Sequence]()
    for number, (rule, draw) in enumerate(rules):
        if rule == "add":
            for sequence in choices(f"{number}.", 1 + draw % 5, n=1 + draw % 3):
                queue.add(sequence)
                model.add(sequence)
        elif rule == "preempt" and running:
            sequence = running.pop()
            queue.put_back(sequence)
            model.put_back(sequence)
        elif rule in ("take", "remove") and model.items:
            # A scheduler takes from the front, or passes over the siblings of what it has just begun.
            first = model.items[0].request
            rest = [s for s in model.items if s.request is not first]
            passed = rule == "take" and draw % 2 and rest and any(s.request is first for s in running)
            sequence = (
                model.items[draw % len(model.items)] if rule == "remove" else rest[0] if passed else model.items[0]
            )
            if rule == "take":
                queue.take(sequence)
            else:
                queue.end(sequence, waiting=True)
            model.drop(sequence)
            if rule == "take":
                running.append(sequence)
        served_first = {s.request.request_id for s in running}
        begun = [s for s in model.items if s.request.request_id in served_first]
        rest = [s for s in model.items if s.request.request_id not in served_first]
        assert set(queue) == set(model.items)
        assert [s for s in queue if s in rest] == rest
        assert [s for s in queue if s in begun] == begun
        assert len(queue) == len(model.items)


def test_the_choices_of_a_request_stay_together() -> None:
    queue = WaitingQueue()
    fill(queue, choices("x", 10, n=3), choices("y", 1, key=B), choices("z", 1, key=B, n=2))
    assert names(queue) == ["x0", "x1", "x2", "y0", "z0", "z1"]
    queue.take(next(iter(queue)))
    assert names(queue) == ["x1", "x2", "y0", "z0", "z1"], "what has begun comes before any other key"
    queue.end(next(iter(queue)), waiting=True)
    assert names(queue) == ["x2", "y0", "z0", "z1"]


def test_what_was_preempted_is_first() -> None:
    queue = WaitingQueue()
    x, y, z = choices("x", n=2), choices("y", key=B), choices("z", priority=-100)
    fill(queue, x, y, z)
    queue.take(z[0])
    queue.take(x[0])
    queue.put_back(x[0])
    queue.put_back(z[0])
    assert names(queue) == ["z0", "x0", "x1", "y0"]


def test_taking_while_iterating() -> None:
    queue = WaitingQueue()
    fill(queue, choices("x", 5, n=2), choices("y", 3, key=B), choices("z", 1), choices("w", 1, key=B))
    whole = names(queue)
    seen = []
    for sequence in queue:
        seen.append(f"{sequence.request.request_id}{sequence.index}")
        queue.take(sequence)
    assert seen == whole
    assert not list(queue)
    assert (len(queue), queue.num_tokens, queue.tokens_of(A), queue.tokens_of(B)) == (0, 0, 0, 0)


# ---------------------------------------------------------------- priorities


def test_lower_priorities_are_earlier_and_age() -> None:
    clock = Clock()
    queue = WaitingQueue(ageing_s=10.0, clock=clock)
    fill(queue, choices("late", priority=2), choices("plain"), choices("soon", priority=-1))
    assert names(queue) == ["soon0", "plain0", "late0"]
    clock.now = 15.0
    fill(queue, choices("next"))
    assert names(queue) == ["soon0", "plain0", "next0", "late0"], "two levels are worth 20 s"
    clock.now = 25.0
    fill(queue, choices("over"))
    assert names(queue) == ["soon0", "plain0", "next0", "late0", "over0"]


def test_a_priority_is_no_claim_on_the_share_of_another_key() -> None:
    queue = WaitingQueue()
    for i in range(4):
        fill(queue, choices(f"x{i}.", 10, priority=-100), choices(f"y{i}.", 10, key=B))
    assert [sequence.request.tenant for sequence in take_all(queue)] == [A, B] * 4


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=40), st.integers(-100, 100))
def test_no_priority_starves(priorities: list[int], own: int) -> None:
    """Something always comes that claims to be more urgent: a request waits no longer than its ageing says."""
    clock = Clock()
    queue = WaitingQueue(ageing_s=1.0, clock=clock)
    fill(queue, choices("own", priority=own))
    for number in range(1000):
        fill(queue, choices(f"{number}.", priority=priorities[number % len(priorities)]))
        sequence = next(iter(queue))
        queue.take(sequence)
        if sequence.request.request_id == "own":
            break
        clock.now += 1.0
    assert clock.now <= max(own - min(priorities), 0) + 1


# ---------------------------------------------------------------- keys


@given(
    st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=60),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
)
def test_while_keys_wait_they_share_by_weight(load: list[tuple[bytes, int, int]], weights: tuple[int, ...]) -> None:
    """While two keys have waited all along, their tokens by weight differ by no more than one request of each."""
    queue = WaitingQueue()
    weight = dict(zip((A, B, C), weights, strict=True))
    output = {}
    for number, (key, size, made) in enumerate(load):
        fill(queue, choices(f"{number}.", size, key=key, weight=weight[key]))
        output[f"{number}."] = made
    served = dict.fromkeys(weight, 0.0)
    largest = {key: max((s + m for k, s, m in load if k == key), default=0) / weight[key] for key in weight}
    waiting = {key: sum(k == key for k, _, _ in load) for key in weight}
    for sequence in take_all(queue):
        key, made = sequence.request.tenant, output[sequence.request.request_id]
        queue.charge(sequence, made)
        served[key] += (sequence.num_prompt + made) / weight[key]
        waiting[key] -= 1
        present = [k for k in weight if waiting[k]]
        for one in present:
            for other in present:
                assert served[one] - served[other] <= largest[one] + largest[other] + 1e-9


@given(st.integers(1, 30), st.integers(1, 50), st.integers(1, 5), st.integers(0, 20))
def test_no_key_starves(burst: int, size: int, weight: int, before: int) -> None:
    """A key whose rival sends without end, whatever that had before, waits for one request of the rival at most."""
    queue = WaitingQueue()
    number = 0
    for _ in range(before):
        fill(queue, choices(f"{number}.", size, key=B, weight=weight))
        number += 1
        queue.take(next(iter(queue)))
    fill(queue, choices("own", 1))
    taken = 0
    while True:
        for _ in range(burst):
            fill(queue, choices(f"{number}.", size, key=B, weight=weight))
            number += 1
        sequence = next(iter(queue))
        queue.take(sequence)
        if sequence.request.request_id == "own":
            break
        taken += sequence.num_prompt
    assert taken <= size


def test_a_key_that_was_away_has_saved_nothing_up() -> None:
    queue = WaitingQueue()
    fill(queue, choices("y", 5, key=B))
    queue.take(next(iter(queue)))
    for i in range(10):
        fill(queue, choices(f"x{i}.", 100))
        if i < 7:
            queue.take(next(iter(queue)))
    for i in range(4):
        fill(queue, choices(f"y{i}.", 100, key=B))
    assert [sequence.request.tenant for sequence in queue] == [B, A, B, A, B, A, B]
    assert queue.spread() == (2, 0.0)


class Remembering(WaitingQueue):
    """Never forgets a key."""

    def _tenant(self, key: bytes) -> _Tenant:
        return self._tenants.setdefault(key, _Tenant(next(self._serials)))


RULES = st.sampled_from(["add", "take", "charge", "end", "end"])


@given(st.lists(st.tuples(RULES, st.integers(0, 50), st.sampled_from([A, B, C, b"d"])), max_size=80))
def test_a_key_that_was_forgotten_comes_back_where_it_would_have_been(rules: list[tuple[str, int, bytes]]) -> None:
    """No key gains or loses anything by it, and none is kept that has nothing going on and nothing to lose."""
    queue, whole = WaitingQueue(), Remembering()
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    for number, (rule, draw, key) in enumerate(rules):
        if rule == "add":
            new = choices(f"{number}.", 1 + draw, key=key, n=1 + draw % 2, weight=1 + draw % 3)
            waiting += new
            for each in (queue, whole):
                fill(each, new)
        elif rule == "take" and waiting:
            running.append(waiting.pop(draw % len(waiting)))
            for each in (queue, whole):
                each.take(running[-1])
        elif rule == "charge" and running:
            for each in (queue, whole):
                each.charge(running[draw % len(running)], draw)
        elif rule == "end" and waiting + running:
            waits = not running or bool(waiting and draw % 2)
            ended = (waiting if waits else running).pop()
            for each in (queue, whole):
                each.end(ended, waiting=waits)
        assert queue._level() == whole._level()
        assert {k: t.served for k, t in queue._tenants.items() if t.groups} == {
            k: t.served for k, t in whole._tenants.items() if t.groups
        }
    level = queue._level()
    fill(queue, choices("last", key=b"new"))
    live = {sequence.request.tenant for sequence in waiting + running}
    kept = {k for k, t in whole._tenants.items() if k in live or t.served > level}
    assert set(queue._tenants) == kept | {b"new"}


def test_what_waits_is_counted() -> None:
    queue = WaitingQueue()
    x = choices("x", 7, n=3)
    fill(queue, x, choices("y", 4, key=B))
    assert (len(queue), queue.num_tokens, queue.tokens_of(A), queue.tokens_of(B), queue.tokens_of(C)) == (
        4,
        11,
        7,
        4,
        0,
    )
    queue.take(x[0])
    assert (len(queue), queue.num_tokens, queue.tokens_of(A)) == (3, 4, 0), "its prompt is being computed"
    queue.put_back(x[0])
    assert (len(queue), queue.num_tokens) == (4, 4)
