"""`specd ctl`: what each verb sends, what it prints, and its exit codes, against a real control socket."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from specd import cli
from specd.commands import ctl_status, ctl_top
from specd.commands.ctl import _VERBS
from specd.commands.ctl_client import Client
from specd.config import Config, ServerConfig
from specd.errors import ConfigError, SpecdError
from specd.server.admin.peers import Level, Levels
from tests.admin import Desk, serving
from tests.admin_engine import Engine


class Served:
    """An engine and its control socket on an event loop in another thread."""

    def __init__(self, path: Path, desk: Desk) -> None:
        self.path, self.desk = path, desk
        self.engine: Engine
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._done: asyncio.Event
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        self.engine, self._done = Engine(), asyncio.Event()
        async with serving(self.path, self.engine, self.desk):
            self._ready.set()
            await self._done.wait()

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(10)
        self._loop.close()

    def ctl(self, *words: str) -> int:
        return cli.main(["ctl", "--socket", str(self.path), *words])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    with structlog.testing.capture_logs(), Served(tmp_path / "a.sock", Desk(key_file=str(keys))) as found:
        yield found


def out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_requests(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.ctl("abort", "--all") == 1  # there is none
    assert capsys.readouterr().err == "specd: no live request is of that kind\n"
    served.engine.start("chatcmpl-a#0.0", "b", "c")
    assert served.ctl("requests") == 0
    assert "chatcmpl-a#0.0" in out(capsys)
    assert served.ctl("requests", "--state", "waiting") == 0
    assert out(capsys) == "none\n"
    assert served.ctl("request", "a") == 0
    shown = out(capsys)
    assert "params.temperature" in shown
    assert "step  source  drafted  emitted" in shown
    assert served.ctl("request", "x/y") == 1
    assert "not_found" in capsys.readouterr().err
    assert served.ctl("abort", "resp_x") == 1
    assert capsys.readouterr().err == "specd: there is no live request 'resp_x'\n"
    assert served.ctl("abort", "resp_a", "b") == 0
    assert capsys.readouterr().err == ""
    assert served.engine.aborted == ["chatcmpl-a#0.0", "b"]
    assert served.ctl("abort") == 2
    assert "give ids" in capsys.readouterr().err
    assert served.ctl("abort", "--older-than", "0.1") == 0
    assert served.engine.live == {}


def test_life(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.engine.start("a")
    assert served.ctl("drain", "--timeout", "0.01") == 75
    assert "left      1" in out(capsys)
    assert served.ctl("drain", "--no-wait") == 0
    assert served.ctl("drain", "--timeout", "0.01", "--deadline") == 0
    assert served.ctl("pause") == 1  # it is draining
    assert served.ctl("resume") == 0
    assert served.ctl("pause") == 0
    assert served.engine.paused
    assert served.ctl("unpause", "--if-generation", "1") == 1
    assert "generation_mismatch" in capsys.readouterr().err
    assert served.ctl("unpause") == 0
    assert served.ctl("shutdown", "--now", "--timeout", "2") == 0
    assert [(wish.drain, wish.timeout_s) for wish in served.desk.shutdowns] == [(False, 2.0)]


def test_settings(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.ctl("speculation", "--k", "3") == 0
    assert served.engine.k == 3
    assert served.ctl("speculation", "--off", "--ttl", "60") == 0
    assert served.engine.k == 0
    assert served.ctl("speculation", "--k", "adaptive") == 0
    assert served.ctl("speculation", "--configured") == 0
    assert served.engine.k is None
    for wrong in (["speculation"], ["speculation", "--k", "x"], ["speculation", "--off", "--k", "1"], ["loglevel"]):
        with pytest.raises(SystemExit, match="2"):
            served.ctl(*wrong)
    assert served.ctl("loglevel", "debug") == 0
    assert served.ctl("loglevel", "configured") == 0
    assert served.desk.log_levels == ["debug", None]
    assert served.ctl("kv") == 0
    assert served.ctl("kv", "--flush") == 0
    assert served.engine.cached_pages == 0


def test_keys(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.ctl("keys", "--add", "me", "--json") == 0
    made = json.loads(out(capsys))
    assert made["key"].startswith("sk-")
    assert served.ctl("keys") == 0
    assert made["id"] in out(capsys)
    assert served.ctl("keys", "--remove", made["id"]) == 0
    assert served.ctl("keys", "--remove", made["id"]) == 1


def test_reload(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.ctl("reload") == 0
    assert out(capsys).startswith("nothing changed")
    assert served.ctl("reload", "--dry-run") == 0
    assert out(capsys).startswith("nothing would change")
    assert served.ctl("reload", "--json") == 0
    assert json.loads(out(capsys)) == {"dry_run": False, "applied": {}, "needs_restart": {}}
    served.desk.reread = lambda: Config(server=ServerConfig(max_stop=9, port=1))
    assert served.ctl("reload", "--dry-run") == 0
    assert "needs_restart.server.port.to" in out(capsys)
    assert served.ctl("reload") == 0

    def broken() -> Config:
        raise ConfigError("specd.toml: unknown key server.prot")

    served.desk.reread = broken
    assert served.ctl("reload") == 78
    assert "server.prot" in capsys.readouterr().err


def test_files(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.ctl("trace", "-o", str(tmp_path / "t.json")) == 0
    assert json.loads((tmp_path / "t.json").read_text())["seconds"] == 5.0
    assert served.ctl("dump", "-o", str(tmp_path / "d.json")) == 0
    assert "invariants" in json.loads((tmp_path / "d.json").read_text())
    assert served.ctl("profile", "--seconds", "0.1", "-o", str(tmp_path / "p.txt")) == 0
    stack, _, count = (tmp_path / "p.txt").read_text().splitlines()[0].rpartition(" ")
    assert ";" in stack
    assert int(count) > 0
    assert served.ctl("profile", "heap", "--seconds", "0.05") == 0
    assert served.ctl("profile", "torch", "--seconds", "0.05", "--json") == 0
    said = capsys.readouterr()
    assert isinstance(json.loads(said.out.splitlines()[-1])["operations"], list)
    assert "no operations of PyTorch" in said.err
    assert served.ctl("profile", "--seconds", "0") == 1


def test_selftest(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The scripted engine says the same either way, and claims to have drafted; its texts stop early: a fault."""
    assert served.ctl("selftest") == 1
    assert "self-test ended with" in capsys.readouterr().err


def test_status_is_for_people(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    counts = [0, 90, 10, 0]
    stages = {"verify": {"bounds": [0.01, 0.02, 0.1], "counts": counts, "total": 2.0}}
    sizes = {"bounds": [1, 8], "counts": [0, 0, 100], "total": 1600}
    stats = {"drafts": {"ngram": 4}, "draft_tokens": {"ngram": 8, "mtp": 0}, "accepted_tokens": {"ngram": 6}}
    more = {"accepted_per_position": [4, 2], "drafted_per_position": [4, 4], "stages": stages, "step_tokens": sizes}
    shown = ctl_status.render({"state": "ready", "stats": {"steps": 100, **stats, **more}})
    assert "bounds" not in shown
    assert [
        line.split() for line in shown.split("\n") if line.startswith(("stage", "verify", "all", "ngram", "2 "))
    ] == [
        ["stage", "count", "mean_ms", "p50_ms", "p90_ms", "p99_ms"],
        ["verify", "100", "20", "15.556", "20", "92"],
        ["all", "100", "16", "above", "8", "above", "8", "above", "8"],
        ["ngram", "4", "8", "6", "0.75", "2.5"],
        ["2", "4", "2", "0.5"],
    ]
    assert served.ctl("status") == 0
    assert "stats.accepted_requests" in out(capsys)
    assert served.ctl("status", "--json") == 0
    assert "stages" in json.loads(out(capsys))["stats"]


def test_top_and_events_when_piped(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.engine.start("a-request")
    assert served.ctl("top", "--interval", "0.1") == 0
    screen = out(capsys)
    assert "0.0 tokens/s" in screen
    assert "a-request" in screen
    assert "\x1b" not in screen
    assert served.ctl("top", "--interval", "0.1", "--json") == 0
    assert json.loads(out(capsys))["type"] == "snapshot"
    assert served.ctl("events", "--interval", "0.1", "--count", "2") == 0
    assert [json.loads(line)["type"] for line in out(capsys).splitlines()] == ["snapshot", "snapshot"]
    assert served.ctl("events", "--interval", "0") == 1
    assert "out_of_range" in capsys.readouterr().err


def test_the_screen_fits(served: Served) -> None:
    served.engine.start(*(f"request-{i}" for i in range(30)))
    events = Client(served.path).events(0.1)
    next(events)
    snapshot = next(events)
    changed = {"type": "changed", "what": "pause", "generation": 2}
    lines = ctl_top.screen(snapshot, [changed], width=60, height=12).split("\n")
    assert len(lines) == 12
    assert max(map(len, lines)) <= 60
    assert any("changed: pause" in line for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_headings_are_whole_whatever_the_width(served: Served, width: int) -> None:
    name = "chatcmpl-0123456789abcdef0123456789abcdef#0.0"
    served.engine.start(name)
    events = Client(served.path).events(0.1)
    next(events)
    snapshot = next(events)
    lines = ctl_top.screen(snapshot, [], width=width, height=100).split("\n")
    assert max(map(len, lines)) <= width
    (heading,) = [line for line in lines if line.startswith("request ")]
    heads = ["request", "state", "age s", "prompt", "output", "pages", "k", "kept"]
    shown = [head for head in heads if f" {head} " in f" {heading} "]
    assert shown == heads[: len(shown)]
    assert len(shown) >= (8 if width >= 80 else 3)
    row = lines[lines.index(heading) + 1].split()
    assert name.startswith(row[0].removesuffix("\N{HORIZONTAL ELLIPSIS}"))
    assert (row[0] == name) == (width == 200)
    words = {word.strip(",") for word in " ".join(lines).split()}
    assert words >= {"tokens/s", "steps/s", "lag", "waiting", "aborted", "live", "cached"}, "nothing is cut"


def test_a_daemon_that_ends_before_it_is_measured() -> None:
    with pytest.raises(SpecdError, match="ended"):
        ctl_top.run(iter([{"type": "end"}]), as_json=True)


def test_not_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    levels = Levels()
    monkeypatch.setattr(levels, "of", lambda peer: Level.USER)
    with Served(tmp_path / "a.sock", Desk(levels=levels)) as served:
        assert served.ctl("pause") == 77
        assert "not operator here" in capsys.readouterr().err
        assert served.ctl("status") == 0


def test_nobody_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ctl", "--socket", str(tmp_path / "x.sock"), "status"]) == 69
    assert "x.sock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "content"),
    [
        ("status", b"hi"),
        pytest.param("status", b"[" * 100_000, id="deep"),
        ("events", b"[1]\n"),
        ("top", b'{"message": "page not found"}\n'),
    ],
)
def test_strangers(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, content: bytes) -> None:
    path = tmp_path / "x.sock"

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        assert cli.main(["ctl", "--socket", str(path), verb]) == 69
        thread.join(5)
    assert "not JSON, or not specd's" in capsys.readouterr().err


def test_every_verb_has_an_action() -> None:
    parser = cli.build_parser()
    found: Any = parser._subparsers
    (commands,) = found._group_actions
    (verbs,) = [a for a in commands.choices["ctl"]._actions if isinstance(a, argparse._SubParsersAction)]
    assert set(verbs.choices) == set(_VERBS)


@pytest.mark.parametrize("seconds", ["nan", "inf", "-100", "1e300", "soon", ""])
def test_what_is_no_time_is_no_option_s_value(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ("profile", "--seconds"),
        ("drain", "--timeout"),
        ("top", "--interval"),
        ("loglevel", "info", "--ttl"),
    ):
        with pytest.raises(SystemExit) as refused:
            cli.main(["ctl", *words, seconds])
        assert refused.value.code == 2
        assert f"{seconds!r} is not a number of seconds" in capsys.readouterr().err
