"""What the control socket shows: plain data, made of the engine's records. Never any prompt or output text."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from specd.server.admin.console import Console
from specd.server.metrics import version
from specd.stacks import task_stacks, thread_stacks
from specd.status import EngineStats

_ROWS = 64  # requests in a snapshot
_SHARED_S = 0.05  # how old a snapshot may be that is told once more


def plain(record: Any) -> dict[str, Any]:
    """A record's fields; mappings of any kind become objects."""
    values = ((field.name, getattr(record, field.name)) for field in dataclasses.fields(record))
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values}


def status(console: Console) -> dict[str, Any]:
    """`info` and `stats` are EngineInfo and EngineStats field by field."""
    engine = console.engine
    stats = engine.stats()
    return {
        "version": version(),
        "pid": os.getpid(),
        "state": console.state,
        "generation": console.generation,
        "stopping": console.daemon.stopping(),
        "loop_lag_s": console.daemon.loop_lag_s(),
        "speculation": speculation(console),
        "log_level": log_level(console),
        "reloads": {"successes": console.reloader.successes, "failures": console.reloader.failures},
        "info": plain(engine.info),
        "stats": plain(stats),
    }


def speculation(console: Console) -> dict[str, Any]:
    return {**plain(console.engine.draft_length), "ttl_left_s": console.draft_length.ttl_left_s}


def log_level(console: Console) -> dict[str, Any]:
    override = console.log_level
    configured = console.reloader.config.log.level
    return {"level": override.value or configured, "configured": configured, "ttl_left_s": override.ttl_left_s}


def kv(console: Console) -> dict[str, Any]:
    found = plain(console.engine.kv())
    asked = found["prompt_tokens"]
    return {**found, "hit_rate": found["cached_tokens"] / asked if asked else None}


class Snapshots:
    """What /v1/events tells, made once for all who ask at about the same time: each costs a walk over the requests."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._made_s = -math.inf
        self._generation = 0
        self._latest: tuple[dict[str, Any], EngineStats]

    def since(self, before: EngineStats | None) -> tuple[dict[str, Any], EngineStats]:
        """One line of /v1/events. Rates are since `before`, None in the first one."""
        now_s, generation = self._clock(), self._console.generation
        if now_s - self._made_s >= _SHARED_S or generation != self._generation:
            self._latest, self._generation, self._made_s = snapshot(self._console), generation, now_s
        event, stats = self._latest
        return {**event, "rates": None if before is None else rates(before, stats)}, stats


def snapshot(console: Console) -> tuple[dict[str, Any], EngineStats]:
    """All of a line but its rates, and what the next line's are made of."""
    stats = console.engine.stats()
    event = {
        "type": "snapshot",
        "ts": time.time(),
        "state": console.state,
        "generation": console.generation,
        "uptime_s": stats.uptime_s,
        "last_progress_s": stats.last_progress_s,
        "loop_lag_s": console.daemon.loop_lag_s(),
        "model": console.engine.info.served_names[0],
        "drafter": console.engine.info.drafter,
        "speculation": speculation(console),
        "speedup": stats.speedup,
        "running": stats.running,
        "waiting": stats.waiting,
        "pages": {"total": stats.pages_total, "free": stats.pages_free, "cached": stats.pages_cached},
        "accepted": stats.accepted_requests,
        "finished": stats.requests_finished,
        "failed": stats.requests_failed,
        "aborted": stats.requests_aborted,
        "accepted_per_position": stats.accepted_per_position,
        "drafted_per_position": stats.drafted_per_position,
        "num_requests": stats.running + stats.waiting,
        "requests": console.engine.requests(_ROWS),
    }
    return event, stats


def rates(before: EngineStats, now: EngineStats) -> dict[str, float | None]:
    """Per second between two snapshots; accept_len: tokens a step of a row that had drafts."""
    seconds = max(now.uptime_s - before.uptime_s, 1e-3)
    drafts = sum(now.drafts.values()) - sum(before.drafts.values())
    drafted = sum(now.draft_tokens.values()) - sum(before.draft_tokens.values())
    accepted = sum(now.accepted_tokens.values()) - sum(before.accepted_tokens.values())
    return {
        "tokens_per_s": (now.generation_tokens - before.generation_tokens) / seconds,
        "prompt_tokens_per_s": (now.prompt_tokens - before.prompt_tokens) / seconds,
        "steps_per_s": (now.steps - before.steps) / seconds,
        "finished_per_s": (now.requests_finished - before.requests_finished) / seconds,
        "accept_len": 1 + accepted / drafts if drafts else None,
        "acceptance": accepted / drafted if drafted else None,
    }


def dump(console: Console) -> dict[str, Any]:
    """For bug reports: what is configured, queued and running, and where everything stands. Holds no secret."""
    pages = console.engine.kv()
    return {
        "status": status(console),
        "config": dataclasses.asdict(console.reloader.config),
        "keys": len(console.keys.entries()),
        "kv": kv(console),
        "requests": console.engine.requests(),
        "invariants": {
            "pages_add_up": pages.free + pages.cached + pages.owned == pages.total,
            "lost_requests": console.lost(console.engine.stats()),
        },
        "threads": thread_stacks(),
        "tasks": task_stacks(),
    }
