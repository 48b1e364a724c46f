"""The clients of the soak: each does one thing to the daemon and says how its request ended.

A request that ends without a finish or an error, an answer that is not what was asked for, and an error that the visit
does not expect are violations.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import jsonschema
import orjson

from benchmarks.soak_site import SENTENCE, Outcome, Site, Violation
from specd.errors import SpecdError

_VISIT_S = 600.0  # a machine may be busy
REDUCED = frozenset({"queue_full"})  # an answer to anybody, while a reload has made the queue short
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


# ---------------------------------------------------------------- those who stay


async def stream(site: Site) -> Outcome:
    more: dict[str, Any] = site.draw.choice(({}, {"n": 2}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["the "]}))
    return (await site.follow("/v1/chat/completions", site.stream(**more)))[0]


async def whole(site: Site) -> Outcome:
    more: dict[str, Any] = site.draw.choice(
        ({}, {"n": 3}, {"presence_penalty": 0.5}, {"speculation": {"mode": "off"}}, {"min_p": 0.1, "top_k": 20})
    )
    outcome, answer = await site.ask("/v1/chat/completions", site.chat(**more))
    if outcome.how == "finished" and any(choice["finish_reason"] is None for choice in answer["choices"]):
        raise Violation("a whole answer without a finish reason")
    return outcome


async def prompts(site: Site) -> Outcome:
    body = {
        "model": site.model,
        "prompt": [SENTENCE, "one, two, three,"],
        "max_tokens": 12,
        "n": 2,
        "temperature": 0.8,
    }
    outcome, answer = await site.ask("/v1/completions", body)
    if outcome.how == "finished" and [choice["index"] for choice in answer["choices"]] != [0, 1, 2, 3]:
        raise Violation("two prompts of two choices gave others than four choices")
    return outcome


async def score(site: Site) -> Outcome:
    body = {"model": site.model, "prompt": SENTENCE * 2, "max_tokens": 0, "echo": True, "logprobs": 1}
    return (await site.ask("/v1/completions", body))[0]


async def structured(site: Site) -> Outcome:
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
    outcome, answer = await site.ask(
        "/v1/chat/completions", site.chat(response_format=schema, max_tokens=64, temperature=0.5)
    )
    for choice in answer["choices"] if outcome.how == "finished" else ():
        if choice["finish_reason"] == "stop":
            jsonschema.validate(orjson.loads(choice["message"]["content"]), _SCHEMA)
    return outcome


async def pattern(site: Site) -> Outcome:
    """One of a few grammars: the cache of grammars may grow to far more than a soak could take for a leak."""
    regex = rf"[a-f]{{1,{site.draw.randint(2, 9)}}}{site.draw.randint(0, 1)}"
    return (await site.follow("/v1/chat/completions", site.stream(structured_outputs={"regex": regex})))[0]


async def predicted(site: Site) -> Outcome:
    content = {"type": "content", "content": SENTENCE * 3}
    return (await site.follow("/v1/chat/completions", site.stream(prediction=content)))[0]


async def responses(site: Site) -> Outcome:
    body = {"model": site.model, "input": "Name three ships.", "max_output_tokens": 16, "store": False}
    return (await site.ask("/v1/responses", body))[0]


async def messages(site: Site) -> Outcome:
    body = {"model": site.model, "max_tokens": 16, "messages": [{"role": "user", "content": "Name three ships."}]}
    async with site.post("/v1/messages", body) as reply:
        await reply.read()
        return (
            Outcome("finished")
            if reply.status == 200
            else Outcome("refused", "queue_full" if reply.status == 429 else str(reply.status))
        )


async def tool(site: Site) -> Outcome:
    function = {"name": "set_size", "parameters": _SCHEMA}
    body = site.chat(tools=[{"type": "function", "function": function}], tool_choice="required", max_tokens=64)
    return (await site.ask("/v1/chat/completions", body))[0]


async def slow_reader(site: Site) -> Outcome:
    return (await site.follow("/v1/chat/completions", site.stream(max_tokens=40), pause_s=0.05))[0]


async def greedy(site: Site) -> Outcome:
    """The same text every time, alone or in company, streamed or whole, whatever else the daemon does."""
    prompt = site.draw.choice(GREEDY)
    body = greedy_body(site.model, prompt)
    body |= site.draw.choice(({}, {"speculation": {"mode": "off"}}))
    outcome, text = await site.follow("/v1/chat/completions", body)
    if outcome.how == "finished" and text != site.answers.setdefault(prompt, text):
        raise Violation(f"the greedy answer to {prompt!r} became {text!r}")
    return outcome


GREEDY = ("List the days of the week.", "What is a lighthouse for?", "Repeat this: " + SENTENCE * 2)


def greedy_body(model: str, prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0.0, "stream": True}
    return {**body, "stream_options": {"include_usage": True}}


# ---------------------------------------------------------------- those who leave


async def leave_while_sending(site: Site) -> Outcome:
    leaver = await site.connect("/v1/chat/completions", site.chat(), share=site.draw.random())
    await asyncio.sleep(site.draw.random() * 0.1)
    return leaver.leave()


async def leave_at_any_time(site: Site) -> Outcome:
    """While it is queued, in its prompt or decoding; streamed or not."""
    body = site.chat(stream=site.draw.random() < 0.5, n=site.draw.choice((1, 3)), max_tokens=60, ignore_eos=True)
    leaver = await site.connect("/v1/chat/completions", body)
    await asyncio.sleep(site.draw.choice((0.0, 0.01, 0.1, 0.5)) * site.draw.random())
    return leaver.leave()


async def leave_in_a_stream(site: Site) -> Outcome:
    leaver = await site.connect("/v1/chat/completions", site.stream(max_tokens=60, ignore_eos=True))
    for _ in range(site.draw.randint(1, 30)):
        if not await leaver.reader.readline():
            break
    return leaver.leave()


async def read_nothing(site: Site) -> Outcome:
    leaver = await site.connect("/v1/chat/completions", site.stream(max_tokens=60, n=4, logprobs=True, top_logprobs=20))
    await asyncio.sleep(1 + site.draw.random())
    return leaver.leave()


# ---------------------------------------------------------------- those who are ended, and those who are in charge


async def aborted(site: Site) -> Outcome:
    name = f"soak-{site.draw.getrandbits(60):x}"
    body = site.stream(max_tokens=200, ignore_eos=True)
    reading = asyncio.ensure_future(site.follow("/v1/chat/completions", body, headers={"X-Request-Id": name}))
    await asyncio.sleep(site.draw.random() * 0.5)
    _, (outcome, _) = await asyncio.gather(site.served.call("DELETE", f"/v1/requests/{name}"), reading)
    return outcome


async def late(site: Site) -> Outcome:
    body = site.stream(max_tokens=200, ignore_eos=True)
    return (await site.follow("/v1/chat/completions", body, headers={"x-request-timeout": "0.3"}))[0]


async def wrong(site: Site) -> Outcome:
    more: dict[str, Any] = site.draw.choice(
        (
            {"temperature": 9},
            {"model": "nobody"},
            {"messages": []},
            {"messages": [{"role": "user", "content": SENTENCE * (site.max_len // 8)}]},
            {"structured_outputs": {"regex": "(("}},
        )
    )
    outcome, _ = await site.ask("/v1/chat/completions", site.chat(**more))
    if outcome.how == "finished":
        raise Violation(f"{more} was answered")
    return Outcome("refused", "as it must be")


async def reload(site: Site) -> Outcome:
    """Another length of the queue and another limit, by signal or by command."""
    waiting, stops = site.draw.choice(((256, 4), (256, 6), (4, 4)))
    site.config.write_text(f"[server]\nmax_stop = {stops}\n[scheduler]\nmax_waiting = {waiting}\n", encoding="utf-8")
    if site.draw.random() < 0.5:
        site.served.signal(signal.SIGHUP)
    else:
        await site.served.call("POST", "/v1/reload", {})
    return Outcome("finished")


async def operator(site: Site) -> Outcome:
    async with site.operating:
        await _operate(site)
    return Outcome("finished")


async def _operate(site: Site) -> None:
    what = site.draw.randrange(5)
    if what == 0:
        await site.served.call("POST", "/v1/pause", {})
        await asyncio.sleep(0.05)
        await site.served.call("POST", "/v1/unpause", {})
    elif what == 1:
        await site.served.call("POST", "/v1/kv/flush", {})
    elif what == 2:
        k = site.draw.choice((0, 1, 3))
        await site.served.call("PATCH", "/v1/speculation", {"mode": "auto" if k else "off", "k": k, "ttl": 0.5})
    elif what == 3:
        await site.served.call("GET", "/v1/trace?seconds=2")
    else:
        await site.served.call("GET", "/v1/requests")
        await site.served.metrics()


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A visit, how often it is made beside the others, and the codes of errors that may end it."""

    visit: Callable[[Site], Awaitable[Outcome]]
    weight: int
    codes: frozenset[str] = frozenset()


def _kind(visit: Callable[[Site], Awaitable[Outcome]], weight: int, *codes: str) -> Kind:
    return Kind(visit, weight, frozenset(codes))


KINDS = (
    _kind(stream, 12),
    _kind(whole, 8),
    _kind(prompts, 3),
    _kind(score, 2),
    _kind(structured, 4),
    _kind(pattern, 3),
    _kind(predicted, 3),
    _kind(responses, 2),
    _kind(messages, 2),
    _kind(tool, 2),
    _kind(slow_reader, 3),
    _kind(greedy, 6),
    _kind(leave_while_sending, 3),
    _kind(leave_at_any_time, 8),
    _kind(leave_in_a_stream, 5),
    _kind(read_nothing, 2),
    _kind(aborted, 4, "aborted_by_admin"),
    _kind(late, 3, "deadline_exceeded", "queue_timeout"),
    _kind(wrong, 3, "as it must be"),
    _kind(reload, 2),
    _kind(operator, 3),
)


async def make(kind: Kind, site: Site) -> Outcome:
    """One visit. Raises Violation."""
    name = kind.visit.__name__
    try:
        async with asyncio.timeout(_VISIT_S):
            outcome = await kind.visit(site)
    except (
        SpecdError, aiohttp.ClientError, OSError, LookupError, ValueError, jsonschema.ValidationError
    ) as error:  # fmt: skip
        raise Violation(f"{name}: {type(error).__name__}: {str(error)[:200]}") from error
    except Violation as error:
        raise Violation(f"{name}: {error}") from error
    if outcome.how in ("refused", "ended") and outcome.code not in kind.codes | REDUCED:
        raise Violation(f"{name}: {outcome}")
    return outcome
