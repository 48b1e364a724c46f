"""Who waits, and who is next. On the host, no torch.

    first   what was preempted; then the other choices of a request whose first one runs already
    then    the key that has been served least for its weight; of one key the request with the lowest rank

Keys share by a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): tokens
served divided by the key's weight, a prompt's counted when it is taken and the output's when they are made. It is
deficit round robin with a turn of one request, and no rounds to walk: while two keys wait, what they were served for
their weight differs by at most one request of either. A key that comes back begins level with those that wait, or where
it was when that is more. The level never falls: a key below it that has nothing going on is as good as a new one, and
is forgotten.

Within a key the rank is the time of arrival plus `ageing_s` for each level of priority. So a request overtakes what
came at most that long before it, ages by itself, and nothing starves. Equal priorities are first come, first served,
and with one key that is the whole order.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable, Iterator

from specd.sequence import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class _Group:
    """The choices of one request that wait; the first one taken pays for the prompt."""

    rank: tuple[float, int]  # (seconds, serial)
    sequences: list[Sequence]

    @property
    def num_tokens(self) -> int:
        return self.sequences[0].num_prompt


@dataclasses.dataclass(slots=True, eq=False)
class _Tenant:
    serial: int  # breaks ties
    weight: int = 1
    served: float = 0.0  # tokens / weight
    groups: list[_Group] = dataclasses.field(default_factory=list)  # by rank
    num_tokens: int = 0  # of the prompts in `groups`
    num_live: int = 0  # sequences that wait or run


class WaitingQueue:
    """Iterating gives everybody in the order in which they would be taken; taking what was just given is allowed."""

    def __init__(self, *, ageing_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_tokens = 0  # prompt tokens of the requests that have not begun
        self._ageing_s = ageing_s
        self._clock = clock
        self._serials = itertools.count()
        self._first: collections.deque[Sequence] = collections.deque()
        self._groups: dict[str, _Group] = {}  # by request id
        self._tenants: dict[bytes, _Tenant] = {}
        self._last: _Tenant | None = None  # the latest to wait no longer
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Sequence]:
        yield from tuple(self._first)
        heap = [(t.served, t.serial, t.weight, iter(tuple(t.groups))) for t in self._tenants.values() if t.groups]
        heapq.heapify(heap)
        while heap:
            served, serial, weight, groups = heap[0]
            group = next(groups, None)
            if group is None:
                heapq.heappop(heap)
                continue
            heapq.heapreplace(heap, (served + group.num_tokens / weight, serial, weight, groups))
            yield from tuple(group.sequences)

    def add(self, sequence: Sequence) -> None:
        """A new sequence; the choices of one request are added one after another."""
        request = sequence.request
        self._len += 1
        tenant = self._tenant(request.tenant)
        tenant.num_live += 1
        group = self._groups.get(request.request_id)
        if group is not None:
            group.sequences.append(sequence)
            return
        tenant.weight = request.weight
        if not tenant.groups:
            tenant.served = max(tenant.served, self._level())
        rank = (self._clock() + request.priority * self._ageing_s, next(self._serials))
        group = self._groups[request.request_id] = _Group(rank, [sequence])
        bisect.insort(tenant.groups, group, key=lambda item: item.rank)
        tenant.num_tokens += sequence.num_prompt
        self.num_tokens += sequence.num_prompt

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that was preempted: before everybody else, and it has paid."""
        self._first.appendleft(sequence)
        self._len += 1

    def take(self, sequence: Sequence) -> None:
        """It runs from now on."""
        group = self._drop(sequence)
        if group is None:
            return
        self.charge(sequence, sequence.num_prompt)
        if group.sequences:
            self._first.extend(group.sequences)
            self._forget(sequence, group)

    def end(self, sequence: Sequence, *, waiting: bool) -> None:
        """It is over. waiting: it did not run."""
        if waiting:
            self._drop(sequence)
        self._tenants[sequence.request.tenant].num_live -= 1

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """What a sequence of this key was given."""
        tenant = self._tenants[sequence.request.tenant]
        tenant.served += num_tokens / tenant.weight

    def tokens_of(self, key: bytes) -> int:
        """Prompt tokens of one key's requests that have not begun."""
        tenant = self._tenants.get(key)
        return 0 if tenant is None else tenant.num_tokens

    def spread(self) -> tuple[int, float]:
        """How many keys wait, and by how many tokens per weight the most and the least served of them differ."""
        served = [tenant.served for tenant in self._tenants.values() if tenant.groups]
        return len(served), max(served, default=0.0) - min(served, default=0.0)

    def _tenant(self, key: bytes) -> _Tenant:
        """A key's account. A new one makes room: those whose accounts say nothing are closed."""
        if key not in self._tenants:
            level = self._level()
            self._tenants = {k: t for k, t in self._tenants.items() if t.num_live or t.served > level}
            self._tenants[key] = _Tenant(next(self._serials))
        return self._tenants[key]

    def _level(self) -> float:
        """Where a key begins that did not wait: with the least served that do, else with the last that did."""
        levels = [tenant.served for tenant in self._tenants.values() if tenant.groups]
        return min(levels) if levels else 0.0 if self._last is None else self._last.served

    def _drop(self, sequence: Sequence) -> _Group | None:
        """Takes it out; its group when the request has not begun."""
        self._len -= 1
        group = self._groups.get(sequence.request.request_id)
        if group is None or sequence not in group.sequences:
            self._first.remove(sequence)
            return None
        group.sequences.remove(sequence)
        if not group.sequences:
            self._forget(sequence, group)
        return group

    def _forget(self, sequence: Sequence, group: _Group) -> None:
        """The request waits no longer as a whole."""
        del self._groups[sequence.request.request_id]
        tenant = self._tenants[sequence.request.tenant]
        del tenant.groups[bisect.bisect_left(tenant.groups, group.rank, key=lambda item: item.rank)]
        tenant.num_tokens -= sequence.num_prompt
        self.num_tokens -= sequence.num_prompt
        if not tenant.groups:
            self._last = tenant
