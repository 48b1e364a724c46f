"""The commands of the control socket: each takes its arguments, does one thing and gives the result."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Awaitable, Callable
from typing import Any

from specd import profiling
from specd.errors import RequestError
from specd.selfcheck import compare_with_plain
from specd.server.admin import corpora, views
from specd.server.admin.arguments import Arguments
from specd.server.admin.console import Console, Shutdown
from specd.server.admin.peers import Level
from specd.status import RequestStatus

_MAX_TRACE_S = 3600.0
_MAX_PROFILE_S = 300.0
_LEVELS = ("debug", "info", "warning", "error")
_STATES = ("waiting", "prefilling", "decoding")

Run = Callable[[Console, Arguments], Awaitable[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """`name` is the verb in the log. A command that changes something is logged, and may ask for a generation."""

    name: str
    method: str
    path: str  # with {id} where the path names something: an argument like the others
    level: Level
    run: Run
    text: str = ""  # the argument that a body of text/plain is; the others stand in the query then
    content: tuple[str, ...] = ()  # arguments whose size alone is logged

    @property
    def changes(self) -> bool:
        return self.method != "GET" and self.run not in (selftest, profile)


async def status(console: Console, arguments: Arguments) -> Any:
    arguments.end()
    return views.status(console)


async def requests(console: Console, arguments: Arguments) -> Any:
    state = arguments.choice("state", *_STATES)
    arguments.end()
    return [row for row in console.engine.requests() if state in (None, row.state)]


async def request(console: Console, arguments: Arguments) -> Any:
    name = arguments.text("id") or ""
    arguments.end()
    found = [detail for request_id in console.find(name) for detail in console.engine.request(request_id)]
    if not found:
        raise RequestError(f"there is no live request {name!r}", code="not_found")
    return [dataclasses.asdict(detail) for detail in found]


async def abort(console: Console, arguments: Arguments) -> Any:
    """Idempotent: a request that has ended is no error."""
    name = arguments.text("id") or ""
    arguments.end()
    return {"aborted": console.abort(console.find(name))}


async def abort_filtered(console: Console, arguments: Arguments) -> Any:
    wish = arguments.take("filter")
    arguments.end()
    if not isinstance(wish, dict):
        raise RequestError("filter must be an object", code="invalid_type", param="filter")
    matches = _filter(Arguments(wish))
    found = [row.request_id for row in console.engine.requests() if matches(row)]
    return {"aborted": console.abort(list(dict.fromkeys(found)))}


def _filter(wish: Arguments) -> Callable[[RequestStatus], bool]:
    """All conditions must hold; none at all is refused, so that nobody aborts everything by a slip."""
    everything = wish.flag("all", False)
    state = wish.choice("state", *_STATES)
    older_s = wish.seconds("older_than")
    prefix = wish.text("prefix")
    wish.end()
    if not everything and (state, older_s, prefix) == (None, None, None):
        raise RequestError(
            "filter: give state, older_than or prefix, or all: true", code="missing_parameter", param="filter"
        )
    return lambda row: (
        state in (None, row.state)
        and (older_s is None or row.age_s > older_s)
        and (prefix is None or row.request_id.startswith(prefix))
    )


async def drain(console: Console, arguments: Arguments) -> Any:
    timeout_s = arguments.seconds("timeout")
    mode = arguments.choice("mode", "finish", "deadline") or "finish"
    wait = arguments.flag("wait", True)
    arguments.end()
    console.check_not_stopping()
    if timeout_s is None:
        timeout_s = console.reloader.config.server.drain_timeout_s
    before = console.engine.stats()
    drained = await console.drain(timeout_s, abort_rest=mode == "deadline", wait=wait)
    after = console.engine.stats()
    return {
        "drained": drained,
        "finished": after.requests_finished - before.requests_finished,
        "failed": after.requests_failed - before.requests_failed,
        "aborted": after.requests_aborted - before.requests_aborted,
        "lost": console.lost(after),
        "left": after.live_requests,
    }


async def resume(console: Console, arguments: Arguments) -> Any:
    arguments.end()
    console.check_not_stopping()
    await console.resume()
    return {"state": console.state}


async def pause(console: Console, arguments: Arguments) -> Any:
    arguments.end()
    console.check_ready("pause")
    console.engine.pause()
    stats = console.engine.stats()
    return {"state": console.state, "running": stats.running, "waiting": stats.waiting}


async def unpause(console: Console, arguments: Arguments) -> Any:
    arguments.end()
    console.engine.unpause()
    return {"state": console.state}


async def reload(console: Console, arguments: Arguments) -> Any:
    dry_run = arguments.flag("dry_run", False)
    arguments.end()
    console.check_not_stopping()
    report = console.daemon.reload(dry_run)

    def shown(changes: Any) -> dict[str, Any]:
        return {key: {"from": old, "to": new} for key, (old, new) in changes.items()}

    return {"dry_run": dry_run, "applied": shown(report.applied), "needs_restart": shown(report.needs_restart)}


async def speculation(console: Console, arguments: Arguments) -> Any:
    """mode off, or a length; neither: as configured, which has no ttl, and which mode auto wants to draft."""
    mode = arguments.choice("mode", "auto", "off")
    k = arguments.take("k")
    ttl_s = arguments.seconds("ttl", low=0.001)
    arguments.end()
    if k is not None and k != "adaptive" and type(k) is not int:
        text = f'k = {reprlib.repr(k)}: must be a whole number or "adaptive"'
        raise RequestError(text, code="invalid_type", param="k")
    if mode == "off":
        if k:
            raise RequestError(f"k = {k!r} contradicts mode off", code="invalid_value", param="k")
        k = 0
    elif mode == "auto" and k == 0:
        raise RequestError("k = 0 contradicts mode auto", code="invalid_value", param="k")
    elif mode == "auto" and k is None and console.engine.draft_length.configured == 0:
        text = "mode = auto: no drafts are configured (speculation.draft, speculation.draft_len); give k"
        raise RequestError(text, code="invalid_value", param="mode")
    _check_ttl(ttl_s, k, "k, or mode off")
    console.draft_length.set(k, ttl_s)
    return views.speculation(console)


async def loglevel(console: Console, arguments: Arguments) -> Any:
    """No level: as configured, which has no ttl."""
    level = arguments.choice("level", *_LEVELS)
    ttl_s = arguments.seconds("ttl", low=0.001)
    arguments.end()
    _check_ttl(ttl_s, level, "level")
    console.log_level.set(level, ttl_s)
    return views.log_level(console)


def _check_ttl(ttl_s: float | None, value: object, needed: str) -> None:
    if ttl_s is not None and value is None:
        text = f"ttl = {ttl_s:g}: give {needed}; what is configured lasts"
        raise RequestError(text, code="missing_parameter", param="ttl")


async def kv(console: Console, arguments: Arguments) -> Any:
    arguments.end()
    return views.kv(console)


async def kv_flush(console: Console, arguments: Arguments) -> Any:
    arguments.end()
    return {"flushed_pages": console.engine.flush_kv()}


async def trace(console: Console, arguments: Arguments) -> Any:
    seconds = arguments.seconds("seconds", low=0.001, high=_MAX_TRACE_S)
    arguments.end()
    return console.engine.trace(10.0 if seconds is None else seconds)


async def profile(console: Console, arguments: Arguments) -> Any:
    kind = arguments.choice("kind", *profiling.KINDS) or profiling.KINDS[0]
    seconds = arguments.seconds("seconds", low=0.05, high=_MAX_PROFILE_S)
    arguments.end()
    return await profiling.profile(kind, 5.0 if seconds is None else seconds)


async def dump(console: Console, arguments: Arguments) -> Any:
    arguments.end()
    return views.dump(console)


async def keys(console: Console, arguments: Arguments) -> Any:
    arguments.end()
    return console.keys.entries()


async def keys_add(console: Console, arguments: Arguments) -> Any:
    name = arguments.text("name", most=64)
    arguments.end()
    if name is None:
        raise RequestError("name is required", code="missing_parameter", param="name")
    return console.keys.add(name)


async def keys_remove(console: Console, arguments: Arguments) -> Any:
    key_id = arguments.text("id") or ""
    arguments.end()
    return console.keys.remove(key_id)


async def selftest(console: Console, arguments: Arguments) -> Any:
    """Whether speculation changes the text of the built-in prompts: it must not."""
    arguments.end()
    console.check_ready("selftest")
    engine = console.engine
    return [views.plain(found) for found in await compare_with_plain(engine.submit, engine.info, engine.tokenizer)]


async def shutdown(console: Console, arguments: Arguments) -> Any:
    wish = Shutdown(arguments.flag("drain", True), arguments.seconds("timeout"))
    arguments.end()
    console.daemon.shutdown(wish)
    return {"draining": wish.drain}


COMMANDS = (
    Command("status", "GET", "/v1/status", Level.USER, status),
    Command("requests", "GET", "/v1/requests", Level.USER, requests),
    Command("kv", "GET", "/v1/kv", Level.USER, kv),
    Command("request", "GET", "/v1/requests/{id}", Level.OPERATOR, request),
    Command("trace", "GET", "/v1/trace", Level.OPERATOR, trace),
    Command("abort", "DELETE", "/v1/requests/{id}", Level.OPERATOR, abort),
    Command("abort", "POST", "/v1/requests/abort", Level.OPERATOR, abort_filtered),
    Command("drain", "POST", "/v1/drain", Level.OPERATOR, drain),
    Command("resume", "POST", "/v1/resume", Level.OPERATOR, resume),
    Command("pause", "POST", "/v1/pause", Level.OPERATOR, pause),
    Command("unpause", "POST", "/v1/unpause", Level.OPERATOR, unpause),
    Command("reload", "POST", "/v1/reload", Level.OPERATOR, reload),
    Command("speculation", "PATCH", "/v1/speculation", Level.OPERATOR, speculation),
    Command("loglevel", "PUT", "/v1/loglevel", Level.OPERATOR, loglevel),
    Command("kv-flush", "POST", "/v1/kv/flush", Level.OPERATOR, kv_flush),
    Command("selftest", "POST", "/v1/selftest", Level.OPERATOR, selftest),
    Command("profile", "POST", "/v1/profile", Level.ADMIN, profile),
    Command("dump", "GET", "/v1/dump", Level.ADMIN, dump),
    Command("keys", "GET", "/v1/keys", Level.ADMIN, keys),
    Command("keys-add", "POST", "/v1/keys", Level.ADMIN, keys_add),
    Command("keys-remove", "DELETE", "/v1/keys/{id}", Level.ADMIN, keys_remove),
    Command("corpora", "GET", "/v1/corpora", Level.ADMIN, corpora.listed),
    Command("corpora-show", "GET", "/v1/corpora/{name}", Level.ADMIN, corpora.show),
    Command(
        "corpora-put",
        "PUT",
        "/v1/corpora/{name}",
        Level.ADMIN,
        corpora.put,
        text="text",
        content=("text", "token_ids"),
    ),
    Command("corpora-delete", "DELETE", "/v1/corpora/{name}", Level.ADMIN, corpora.delete),
    Command("shutdown", "POST", "/v1/shutdown", Level.ADMIN, shutdown),
)
