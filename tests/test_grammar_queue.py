"""Who waits for a grammar to be compiled, for how long, and what of others' grammars nobody waits for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from specd import grammar as module
from specd.errors import DrainingError, OverloadedError, QueueFullError, RequestError
from specd.grammar import Grammars
from specd.guidance import vocabulary_line
from specd.request import Grammar
from tests.fake_engine import byte_tokenizer
from tests.test_grammar import ENDLESS, grammars, make, refusal


async def test_time_limits_are_of_the_processor_first() -> None:
    """A busy machine, here one that does nothing else for a while, is not the grammar's fault."""
    slow = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    async with grammars() as made:
        await made.prepare(Grammar("regex", "a+"))
        assert made._worker is not None
        pid = made._worker.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        compiling = asyncio.create_task(made.prepare(Grammar("json_schema", json.dumps(slow))))
        while not children.read_text():  # noqa: ASYNC110, ASYNC240  procfs
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.05)  # its timers run
        os.killpg(pid, signal.SIGSTOP)
        await asyncio.sleep(2.2)
        assert not compiling.done(), "it was over before it was stopped"
        os.killpg(pid, signal.SIGCONT)
        await compiling


async def test_a_machine_that_is_too_busy_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process, and to the client, who may try again: nothing is remembered."""
    tokens, special = make()._vocabulary()
    line = vocabulary_line(tokens, special, byte_tokenizer().eos_ids)
    job = json.dumps({"id": 7, "kind": "json_schema", "text": ENDLESS}).encode() + b"\n"
    code = "from specd import grammar_worker as worker; worker.DEADLINE_S = 0.3; worker.main()"
    pipe = asyncio.subprocess.PIPE
    worker = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", code, stdin=pipe, stdout=pipe)
    answer = json.loads((await worker.communicate(line + job))[0])
    assert (answer["id"], answer["late"], "killed" in answer) == (7, True, False)

    async def late(self: Grammars, grammar: Grammar) -> dict[str, Any]:
        tries.append(grammar)
        return answer

    tries: list[Grammar] = []
    monkeypatch.setattr(Grammars, "_try_out", late)
    made = make()
    for _ in range(2):
        with pytest.raises(OverloadedError, match="busy"):
            await made.prepare(Grammar("json_schema", ENDLESS))
    assert len(tries) == 2


class Gated(Grammars):
    """Every try waits until `gate` is open; texts that begin with "!" are refused."""

    def __init__(self) -> None:
        tokenizer = byte_tokenizer()
        super().__init__(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)
        self.gate = asyncio.Event()
        self.tries: list[str] = []

    async def _try_out(self, grammar: Grammar) -> dict[str, Any]:
        self.tries.append(grammar.text)
        await self.gate.wait()
        return {"error": "bad" if grammar.text.startswith("!") else None, "bytes": 1}

    async def begin(self, text: str, tenant: bytes = b"") -> asyncio.Task[None]:
        """A request that waits for its grammar, or has been turned away."""
        task = asyncio.create_task(self.prepare(Grammar("regex", text), tenant))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task


async def test_what_is_known_never_waits() -> None:
    """Nothing is awaited: no other grammar is compiled, and none forgotten, between `prepare` and `matcher`."""
    made = Gated()
    made.gate.set()
    await made.prepare(Grammar("regex", "known"))
    await refusal(made, "regex", "!known")
    made.gate.clear()
    slow = await made.begin("slow")
    with pytest.raises(StopIteration):
        made.prepare(Grammar("regex", "known")).send(None)
    with pytest.raises(RequestError) as caught:
        made.prepare(Grammar("regex", "!known", "another.field")).send(None)
    assert (caught.value.code, caught.value.param) == ("invalid_regex", "another.field")
    assert not slow.done()
    made.gate.set()
    await slow
    assert made.tries == ["known", "!known", "slow"]


async def test_who_wants_the_same_grammar_does_not_wait_for_the_ones_behind() -> None:
    made = Gated()
    first = await made.begin("same")
    other = await made.begin("other")
    second, cancelled = await made.begin("same"), await made.begin("same")
    cancelled.cancel()
    while not made.tries:  # noqa: ASYNC110  it comes from a thread
        await asyncio.sleep(0.001)
    made.gate.set()
    made.gate.clear()  # one try goes through
    await asyncio.wait_for(asyncio.gather(first, second), 10)
    assert not other.done()
    made.gate.set()
    await other
    assert made.tries == ["same", "other"]
    assert not made._places


async def test_who_compiles_for_others_may_leave() -> None:
    made = Gated()
    first, second = await made.begin("same"), await made.begin("same")
    first.cancel()
    made.gate.set()
    await second
    made.matcher(Grammar("regex", "same"))


async def test_what_was_refused_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_REFUSED", 2)
    made = Gated()
    made.gate.set()
    for text in ("!a", "!b", "!a", "!c", "!a", "!b"):
        await refusal(made, "regex", text)
    assert made.tries == ["!a", "!b", "!c", "!b"]


async def test_no_key_takes_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it leaves free. One more request for a grammar that waits already takes none."""
    monkeypatch.setattr(module, "_MAX_WAITING", 4)
    made = Gated()
    tasks = {}
    for key, text in ("aA", "aB", "aC", "eA", "bD", "bE", "cF", "dG"):
        tasks[key + text] = await made.begin(text, key.encode())
    refused = {name: task for name, task in tasks.items() if task.done()}
    assert set(refused) == {"aC", "bE", "dG"}
    assert all(isinstance(task.exception(), QueueFullError) for task in refused.values())
    made.gate.set()
    await asyncio.gather(*(task for name, task in tasks.items() if name not in refused))
    await made.prepare(Grammar("regex", "C"), b"a")
    assert not made._places


async def test_nothing_is_begun_once_it_is_closed() -> None:
    """Whoever waits is told that the server stops, and no process is started for the next one."""
    async with grammars() as made:
        await made.prepare(Grammar("regex", "a+"))
        asked = [
            asyncio.create_task(made.prepare(Grammar("json_schema", ENDLESS))),
            asyncio.create_task(made.prepare(Grammar("regex", "b+"))),
        ]
        await asyncio.sleep(0.1)
        await made.close()
        errors: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in errors] == [DrainingError] * 2
        with pytest.raises(DrainingError):
            await made.prepare(Grammar("regex", "c+"))
        assert made._worker is None
        await made.prepare(Grammar("regex", "a+"))


async def test_a_process_that_is_about_to_start_ends_too() -> None:
    async with grammars() as made:
        task = asyncio.create_task(made.prepare(Grammar("regex", "a+")))
        await asyncio.sleep(0)
        assert made._worker is None
        await made.close()
        error = (await asyncio.gather(task, return_exceptions=True))[0]
        assert isinstance(error, DrainingError)
        assert made._worker is None
