"""`specd ctl top`: the daemon's snapshots as a screen that redraws itself. Plain ANSI; one snapshot when piped."""

from __future__ import annotations

import contextlib
import json
import queue
import select
import shutil
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Any

from specd.commands.tables import cell, columns
from specd.errors import SpecdError

_ENTER, _LEAVE, _HOME, _BELOW, _TO_END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H", "\x1b[J", "\x1b[K"
_POLL_S = 0.1
_BAR = 20  # characters
_EVENTS = 3  # latest ones that are shown
_ROW = {  # of a request: what is shown, and its heading
    "request_id": "request", "state": "state", "age_s": "age s", "prompt_tokens": "prompt", "output_tokens": "output",
    "pages": "pages", "draft_len": "k", "acceptance": "kept",
}  # fmt: skip
_LEAST_ID = 12  # characters of a request's id that are shown at least


def run(events: Iterator[dict[str, Any]], *, as_json: bool) -> int:
    """Until q, Ctrl-C or the daemon's end on a terminal; else one snapshot, the first that has rates."""
    if not sys.stdout.isatty() or as_json:
        for event in events:
            if event["type"] == "snapshot" and event["rates"] is not None:
                print(json.dumps(event) if as_json else screen(event, [], width=160, height=1000))
                return 0
        raise SpecdError("the daemon ended before it had a second to measure")
    with _terminal(), contextlib.suppress(KeyboardInterrupt):
        _live(events)
    return 0


@contextlib.contextmanager
def _terminal() -> Iterator[None]:
    """The other screen, keys at once and unseen; put back whatever happens."""
    keys = sys.stdin.isatty()
    before = termios.tcgetattr(sys.stdin) if keys else None
    sys.stdout.write(_ENTER)
    try:
        if keys:
            tty.setcbreak(sys.stdin)
        yield
    finally:
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _live(events: Iterator[dict[str, Any]]) -> None:
    arrived: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(events, arrived), daemon=True).start()
    latest: list[dict[str, Any]] = []
    while not _asked_to_leave():
        with contextlib.suppress(queue.Empty):
            event = arrived.get_nowait()
            if event is None or (isinstance(event, dict) and event["type"] == "end"):
                return
            if isinstance(event, Exception):
                raise event
            if event["type"] == "snapshot":
                size = shutil.get_terminal_size()
                lines = screen(event, latest, width=size.columns, height=size.lines - 1).split("\n")
                sys.stdout.write(_HOME + "".join(f"{line}{_TO_END}\n" for line in lines) + _BELOW)
                sys.stdout.flush()
            else:
                latest = [*latest, event][-_EVENTS:]


def _read(events: Iterator[dict[str, Any]], arrived: queue.SimpleQueue[dict[str, Any] | Exception | None]) -> None:
    try:
        for event in events:
            arrived.put(event)
    except SpecdError as error:
        arrived.put(error)
    arrived.put(None)


def _asked_to_leave() -> bool:
    """Waits a moment for a key."""
    if not sys.stdin.isatty():
        threading.Event().wait(_POLL_S)
        return False
    readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
    return bool(readable) and sys.stdin.read(1) in ("q", "Q")


def screen(snapshot: dict[str, Any], latest: list[dict[str, Any]], *, width: int, height: int) -> str:
    """One snapshot as text: at most `height` lines of `width` characters. What is too long goes on in the next line."""
    rates = snapshot["rates"] or {}
    pages, policy = snapshot["pages"], snapshot["speculation"]
    until = "" if policy["ttl_left_s"] is None else f", {cell(policy['ttl_left_s'])} s left"
    overridden = f" (overridden{until})" if policy["overridden"] else ""
    speedup = "" if snapshot["speedup"] is None else f"  speed-up {snapshot['speedup']:.2f} (estimate)"
    used = pages["total"] - pages["free"]
    lines = [
        f"{snapshot['model']}  {snapshot['state']}  up {snapshot['uptime_s']:.0f} s  "
        f"generation {snapshot['generation']}  loop lag {1000 * snapshot['loop_lag_s']:.1f} ms",
        f"running {snapshot['running']}  waiting {snapshot['waiting']}  "
        f"accepted {snapshot['accepted']} = finished {snapshot['finished']} + failed {snapshot['failed']} "
        f"+ aborted {snapshot['aborted']} + live",
        f"{_rate(rates, 'tokens_per_s')} tokens/s  {_rate(rates, 'prompt_tokens_per_s')} prompt tokens/s  "
        f"{_rate(rates, 'steps_per_s')} steps/s",
        f"kv pages {used}/{pages['total']} used, {pages['cached']} cached  {_bar(used, pages['total'])}",
        f"drafter {snapshot['drafter']}, k {policy['k']}{overridden}  {_rate(rates, 'accept_len')} tokens a draft step"
        f"{speedup}",
        *_positions(snapshot),
        *(f"{event['type']}: {event.get('what', '')} (generation {event.get('generation', '-')})" for event in latest),
        "",
    ]
    lines = [part for line in lines for part in _wrapped(line, width)] + _request_lines(snapshot, width)
    return "\n".join(line[:width] for line in lines[:height])


def _wrapped(line: str, width: int) -> list[str]:
    """In lines of at most `width` where it has gaps of two spaces, or else before a +."""
    lines: list[str] = []
    rest = line
    while len(rest) > width:
        at = max(rest.rfind("  ", 3, width + 1), rest.rfind(" + ", 3, width + 1))
        if at < 0:
            break
        lines.append(rest[:at].rstrip())
        rest = "  " + rest[at:].strip()
    return [*lines, rest]


def _rate(rates: dict[str, Any], name: str) -> str:
    value = rates.get(name)
    return "-" if value is None else f"{value:.2f}" if name == "accept_len" else f"{value:.1f}"


def _bar(part: float, whole: float) -> str:
    filled = round(_BAR * part / whole) if whole else 0
    return "[" + "#" * filled + "." * (_BAR - filled) + "]"


def _positions(snapshot: dict[str, Any]) -> list[str]:
    """Drafts kept by their position in the draft, since the start."""
    counts = zip(snapshot["accepted_per_position"], snapshot["drafted_per_position"], strict=True)
    return [
        f"  draft {i}  {_bar(kept, drafted)} {kept / drafted:6.1%} of {drafted}"
        for i, (kept, drafted) in enumerate(counts, 1)
        if drafted
    ]


def _request_lines(snapshot: dict[str, Any], width: int) -> list[str]:
    """A table that fits: the ids give way first, then the last columns."""
    rows = []
    for request in snapshot["requests"]:
        drafted = request["num_draft_tokens"]
        acceptance = request["num_accepted_tokens"] / drafted if drafted else None
        rows.append({head: acceptance if name == "acceptance" else request[name] for name, head in _ROW.items()})
    if not rows:
        return ["no requests"]
    more = snapshot["num_requests"] - len(rows)
    return [*_fitted(rows, width), *([f"and {more} more"] if more else [])]


def _fitted(rows: list[dict[str, Any]], width: int) -> list[str]:
    heads = list(_ROW.values())
    while True:
        shown = [{head: cell(row[head]) for head in heads} for row in rows]
        others = columns([{head: row[head] for head in heads[1:]} for row in shown]) if heads[1:] else ""
        room = width - max(map(len, others.split("\n"))) - 2
        if room >= _LEAST_ID or len(heads) <= 2:
            break
        heads.pop()
    longest = max(room, _LEAST_ID)
    for row in shown:
        name = row["request"]
        row["request"] = name if len(name) <= longest else name[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return columns(shown).split("\n")
