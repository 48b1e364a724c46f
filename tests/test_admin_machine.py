"""The control socket over a real (tiny) engine in every order of commands: a state machine against a small model.

Whatever is asked in whatever order: the state is the one that the model says, no request is lost, pages add up, a
generation is counted for each change and none for a refusal, and every finished text is that of plain decoding.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specd.engine import Engine
from specd.errors import DrainingError
from specd.request import FinishReason
from tests.admin import Caller, serving
from tests.engines import Result, ask, assert_nothing_owned, collect, greedy_answer, make_parts, target_model

PROMPTS = ((5, 6, 7, 5, 6), (9, 8, 9, 8, 9, 8), (30,) * 20)
TOKENS = 12


class AdminMachine(RuleBasedStateMachine):
    """`draining`, `paused`, `generation` and `k` are what the model expects."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.draining = self.paused = False
        self.k: int | str = 4
        self.generation = 1
        self.names = itertools.count()
        self.tasks: dict[str, tuple[tuple[int, ...], asyncio.Task[list[Result]]]] = {}
        self.accepted = 0

    @initialize(draft=st.sampled_from(["ngram", "lm"]))
    def start(self, draft: str) -> None:
        async def enter() -> None:
            self.parts = make_parts(draft=draft, draft_len=4, num_slots=512, max_len=64, max_running=4)
            self.engine = await Engine.start(self.parts, warm=False)
            self.context = serving(Path(self.folder.name, "a.sock"), self.engine)
            self.caller: Caller = await self.context.__aenter__()

        self.runner.run(enter())

    def call(self, method: str, path: str, body: Any = None, **kwargs: Any) -> Any:
        return self.runner.run(self.caller.ask(method, path, body, **kwargs))

    def change(self, method: str, path: str, body: Any = None) -> Any:
        status, reply = self.call(method, path, body)
        assert status == 200, reply
        self.generation += 1
        return reply["result"]

    @rule(prompt=st.sampled_from(PROMPTS))
    def submit(self, prompt: tuple[int, ...]) -> None:
        name = f"r{next(self.names)}"

        async def begin() -> None:
            task = asyncio.ensure_future(collect(self.engine, ask(name, prompt, max_tokens=TOKENS)))
            await asyncio.sleep(0)
            if self.draining:
                assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], DrainingError)
            else:
                self.tasks[name] = (prompt, task)
                self.accepted += 1

        self.runner.run(begin())

    @rule(steps=st.integers(1, 30))
    def run_on(self, steps: int) -> None:
        async def wait() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)

        before = self.engine.stats().steps
        self.runner.run(wait())
        if self.paused:
            assert self.engine.stats().steps <= before + 1  # the one that was on its way

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*self.tasks, "nobody"]))
        aborted = self.change("DELETE", f"/v1/requests/{name}")["aborted"]
        assert aborted in ([], [name])
        assert name != "nobody" or not aborted

    @rule(state=st.sampled_from(["waiting", "decoding"]))
    def abort_filtered(self, state: str) -> None:
        self.change("POST", "/v1/requests/abort", {"filter": {"state": state}})

    @rule()
    def pause(self) -> None:
        status, _ = self.call("POST", "/v1/pause")
        assert status == (409 if self.draining or self.paused else 200)
        if status == 200:
            self.paused = True
            self.generation += 1

    @rule()
    def unpause(self) -> None:
        self.change("POST", "/v1/unpause")
        self.paused = False

    @rule(timeout=st.sampled_from([0.0, 0.005]), mode=st.sampled_from(["finish", "deadline"]), wait=st.booleans())
    def drain(self, timeout: float, mode: str, wait: bool) -> None:
        result = self.change("POST", "/v1/drain", {"timeout": timeout, "mode": mode, "wait": wait})
        self.draining, self.paused = True, False
        assert result["lost"] == 0
        if wait and (mode == "deadline" or result["drained"]):
            assert (result["left"], result["drained"]) == (0, True)

    @rule()
    def resume(self) -> None:
        assert self.change("POST", "/v1/resume")["state"] == "ready"
        self.draining = self.paused = False

    @rule(k=st.sampled_from([0, 1, 4, "adaptive", None, 5, 64]))
    def speculation(self, k: int | str | None) -> None:
        status, reply = self.call("PATCH", "/v1/speculation", {"k": k})
        assert status == (400 if k in (5, 64) else 200), reply
        if status == 200:
            self.k = 4 if k is None else k
            self.generation += 1

    @rule()
    def flush(self) -> None:
        live = self.call("GET", "/v1/requests")[1]["result"]  # one that ends meanwhile leaves pages in the cache
        self.change("POST", "/v1/kv/flush")
        assert live or self.call("GET", "/v1/kv")[1]["result"]["cached"] == 0

    @rule()
    def stale_generation(self) -> None:
        headers = {"If-Match": f'"{self.generation - 1}"'}
        assert self.call("POST", "/v1/pause", headers=headers)[0] == 412

    @invariant()
    def the_model_agrees(self) -> None:
        if not hasattr(self, "engine"):
            return
        _, reply = self.call("GET", "/v1/status")
        result = reply["result"]
        assert result["state"] == ("draining" if self.draining else "paused" if self.paused else "ready")
        assert result["generation"] == self.generation
        assert result["speculation"]["k"] == self.k
        assert result["stats"]["accepted_requests"] == self.accepted
        invariants = self.call("GET", "/v1/dump")[1]["result"]["invariants"]
        assert invariants == {"pages_add_up": True, "lost_requests": 0}
        self.parts.scheduler.pool.check()

    def teardown(self) -> None:
        async def leave() -> None:
            await self.caller.result("POST", "/v1/resume")
            async with asyncio.timeout(30):
                results = await asyncio.gather(*(task for _, task in self.tasks.values()))
            for (prompt, _), (result,) in zip(self.tasks.values(), results, strict=True):
                expected = greedy_answer(target_model(), prompt, TOKENS)
                assert result.tokens == expected[: len(result.tokens)]
                assert result.reason in (FinishReason.LENGTH, FinishReason.ABORT)
                assert (result.reason is FinishReason.ABORT) or len(result.tokens) == TOKENS
            assert_nothing_owned(self.parts)
            await self.context.__aexit__(None, None, None)
            await self.engine.close()

        try:
            if hasattr(self, "caller"):
                self.runner.run(leave())
        finally:
            self.runner.close()
            self.folder.cleanup()


TestAdmin = AdminMachine.TestCase
TestAdmin.settings = settings(
    max_examples=6,
    stateful_step_count=16,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),  # an engine an example: shrinking would take minutes
    report_multiple_bugs=False,
)
