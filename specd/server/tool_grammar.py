"""Calls of tools as a grammar, in llguidance's dialect of Lark: for outputs that must be calls, or must be exact ones.

    required, named   call ("\\n" call)*
    auto              any text, in which each <tool_call> begins a call (with a strict tool, or where one call is all)
                      or calls, or else what `response_format` or `structured_outputs` say

A call is written as Hermes models write it, so `specd.hermes` reads all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specd import one_of
from specd.errors import RequestError
from specd.hermes import BEGIN, END
from specd.request import Grammar
from specd.server.structured import check_end, grammar_of, too_complex
from specd.server.tools import Tool, choice_of

MAX_BYTES = 256 << 10
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_TEXT = r"/(.|\n)*/"


def output_grammar(values: Mapping[str, Any]) -> Grammar | None:
    """The grammar of a request's checked fields, its tools among them. Raises RequestError for what cannot be.

    May be slow where there are tools: each `oneOf` in their parameters has to be proved.
    """
    other, chosen = grammar_of(values), choice_of(values)
    if chosen.mode == "none":
        return other
    offered: tuple[Tool, ...] = values["tools"]
    once = chosen.mode == "named" or not values.get("parallel_tool_calls", True)
    effort = one_of.Effort()
    if chosen.mode in ("required", "named"):
        called = [tool for tool in offered if chosen.mode == "required" or tool.name == chosen.name]
        lines = ["start: calls", *_calls(called, effort, once=once)]
    elif other is not None:
        lines = ["start: calls | answer", _answer(other, effort), *_calls(offered, effort, once=once)]
    elif once or any(tool.strict for tool in offered):
        lines = _among_text(offered, effort, once=once)
    else:
        return None
    text = "\n".join(lines) + "\n"
    grammar = Grammar("lark", text, "tools")
    check_end(values, grammar)
    return grammar


def _calls(called: Sequence[Tool], effort: one_of.Effort, *, once: bool) -> list[str]:
    start = "calls: call" if once else r'calls: call ("\n" call)*'
    return [start, *_alternatives("call", called, [tool.parameters for tool in called], effort, begin=BEGIN)]


def _among_text(offered: Sequence[Tool], effort: one_of.Effort, *, once: bool) -> list[str]:
    """A lazy marker ends at its first possible end, so that text never holds one. Only strict tools are exact here."""
    schemas = [tool.parameters if tool.strict else _ANY_OBJECT for tool in offered]
    return [
        "start: call | rest" if once else "start: call* rest",
        "rest: TEXT",
        f"TEXT: {_TEXT}",
        "call: marker body",
        f"marker[lazy]: TEXT {_literal(BEGIN)}",
        *_alternatives("body", offered, schemas, effort, begin=""),
    ]


def _alternatives(
    rule: str, called: Sequence[Tool], schemas: Sequence[Mapping[str, Any]], effort: one_of.Effort, *, begin: str
) -> list[str]:
    """The rule of one call: what follows `begin`, for each tool."""
    lines = [f"{rule}: " + " | ".join(f"{rule}_{i}" for i in range(len(called)))]
    size = 0
    for i, (tool, schema) in enumerate(zip(called, schemas, strict=True)):
        head = f'{begin}\n{{"name": "{tool.name}", "arguments": '
        lines.append(f"{rule}_{i}: {_literal(head)} arguments_{i} {_literal('}' + chr(10) + END)}")
        lines.append(f"arguments_{i}: {_json(schema, effort)}")
        size += len(lines[-1])
        if size > MAX_BYTES:
            raise too_complex("tools", f"their parameters make a grammar of more than {MAX_BYTES} bytes")
    return lines


def _answer(other: Grammar, effort: one_of.Effort) -> str:
    if other.kind == "json_schema":
        return f"answer: {_json(json.loads(other.text), effort)}"
    if other.kind == "choice":
        return "answer: " + " | ".join(_literal(option) for option in json.loads(other.text))
    raise RequestError(
        f"'{other.param}' cannot be combined with 'tools' unless 'tool_choice' is none, required or a function; "
        "JSON schemas and choices can",
        code="invalid_value",
        param=other.param,
    )


def _json(schema: Mapping[str, Any], effort: one_of.Effort) -> str:
    from specd.guidance import JSON_OPTIONS

    proved = json.loads(one_of.settled(json.dumps(schema), effort))
    return "%json " + json.dumps({**proved, "x-guidance": JSON_OPTIONS})


def _literal(text: str) -> str:
    return json.dumps(text)
