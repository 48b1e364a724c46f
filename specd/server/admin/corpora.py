"""Corpora on the control socket: texts that drafts may be taken from, each for one API key or for everybody.

They change how fast an output comes, never the output. They survive a reload and end with the daemon.
"""

from __future__ import annotations

import asyncio
from typing import Any

from specd.errors import RequestError
from specd.server.admin.arguments import Arguments
from specd.server.admin.console import Console
from specd.server.checks import token_ids

_MAX_NAME = 64


async def listed(console: Console, arguments: Arguments) -> Any:
    arguments.end()
    return console.engine.corpora.describe()


async def show(console: Console, arguments: Arguments) -> Any:
    name = _name(arguments)
    arguments.end()
    return console.engine.corpora.find(name)


async def put(console: Console, arguments: Arguments) -> Any:
    """text or token_ids, for the API key whose id is `key`, or for everybody; for `ttl` seconds, or until deleted."""
    name = _name(arguments)
    text, ids = arguments.take("text"), arguments.take("token_ids")
    key = arguments.text("key", most=64)
    ttl_s = arguments.seconds("ttl", low=0.001)
    arguments.end()
    if (text is None) == (ids is None):
        code = "missing_parameter" if text is None else "invalid_value"
        raise RequestError("exactly one of text and token_ids is needed", code=code, param="text")
    if text is not None and not isinstance(text, str):
        raise RequestError("text: must be a string", code="invalid_type", param="text")
    given = await asyncio.to_thread(token_ids, ids, "token_ids") if text is None else text
    if not given:
        raise RequestError("text and token_ids: must not be empty", code="invalid_value", param="text")
    corpora = console.engine.corpora
    if not corpora.max_tokens:
        reason = "speculation.corpora_tokens or speculation.max_draft is 0, or speculation.draft is none"
        raise RequestError(f"nothing is drafted from corpora here: {reason}", code="conflict")
    salt = None if key is None else console.keys.salt(key)
    return await corpora.put(name, given, key=key, salt=salt, ttl_s=ttl_s)


async def delete(console: Console, arguments: Arguments) -> Any:
    name = _name(arguments)
    arguments.end()
    return await console.engine.corpora.delete(name)


def _name(arguments: Arguments) -> str:
    return arguments.text("name", most=_MAX_NAME) or ""
