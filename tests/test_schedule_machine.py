"""Everything at once: Hypothesis drives a scheduler over KV made of hashes (schedule_world.py).

After every rule: pages add up, one owner per page that is not published, every slot that is claimed to be valid holds
the right prefix for the target and for the drafter, every carry is the newest token's. In the end nothing is held, and
each request has said exactly what it says alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specd.sequence import Phase
from specd.step import DraftTraits
from tests.schedule_checks import check
from tests.schedule_world import EXACT_HEAD, LM, MAX_DRAFT, NO_FAULTS, PADDED_HEAD, PROMPT, Faults, World

MAX_REQUESTS = 10
FAULTS = Faults(step=0.3, broken=0.3, nan=0.1, draft=0.3, refill=0.4, give_up=0.2)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    page_size = draw(st.sampled_from([1, 4, 16]))
    max_len = draw(st.sampled_from([12, 24, 40]))
    max_running = draw(st.integers(1, 4))
    one = -(-(max_len + 1) // page_size)  # pages of one sequence: the least that an engine accepts
    kinds: list[DraftTraits | None] = [None, LM, EXACT_HEAD, PADDED_HEAD]
    traits = draw(st.sampled_from(kinds))
    if traits is not None and draw(st.booleans()):
        traits = dataclasses.replace(traits, max_context=draw(st.integers(1, max_len)))
    return World(
        page_size=page_size,
        num_pages=one + draw(st.integers(0, one)),
        max_running=max_running,
        max_tokens=max_running + draw(st.sampled_from([0, 2, 6, 30])),
        max_len=max_len,
        mixed=draw(st.sampled_from(["speculate", "plain"])),
        prefix_cache=draw(st.booleans()),
        traits=traits,
        length=draw(st.sampled_from([None, None, 0, 1, 4])),
        pad_proposals=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )


class SchedulerMachine(RuleBasedStateMachine):
    world: World

    @initialize(world=worlds())
    def start(self, world: World) -> None:
        self.world = world

    @precondition(lambda self: len(self.world.sequences) < MAX_REQUESTS)
    @rule(
        data=st.data(),
        branch=st.integers(0, 2),
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 3),
        max_draft=st.sampled_from([0, 2, MAX_DRAFT]),
        guesses=st.booleans(),
        stops=st.booleans(),
        salt=st.sampled_from([b"", b"x"]),
    )
    def add(
        self, data: st.DataObject, branch: int, max_tokens: int, n: int, max_draft: int, stops: bool, **rest: Any
    ) -> None:
        """Prompts of few kinds, so that prefixes are found again and part at different places."""
        prompt = PROMPT[: data.draw(st.integers(1, self.world.max_len - 1), label="prompt_len")]
        prompt[-1] += branch * (len(prompt) > 1)
        ends = (3,) if stops else ()
        self.world.add(prompt, max_tokens=max_tokens, n=n, max_draft=max_draft, stop_token_ids=ends, **rest)

    @rule(accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]), count=st.integers(1, 6))
    def steps(self, accuracy: float, count: int) -> None:
        self.world.accuracy = accuracy
        for _ in range(count):
            self.world.step(NO_FAULTS)

    @rule()
    def faulty_step(self) -> None:
        self.world.step(FAULTS)

    @precondition(lambda self: self.world.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.world.sequences))
        sequence.abort_requested = sequence.phase is not Phase.FINISHED

    @rule()
    def flush_prefix_cache(self) -> None:
        self.world.pool.flush()

    @invariant()
    def holds(self) -> None:
        check(self.world)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=400,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
