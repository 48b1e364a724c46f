"""Corpora on the control socket and in `specd ctl`: who may, what is refused, what is logged."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import structlog

from specd.corpora import Corpora
from specd.server.admin.peers import Level, Levels
from specd.server.auth import ApiKeys
from tests.admin import Desk, serving
from tests.admin_engine import Engine
from tests.test_ctl import Served

KEY_ID = hashlib.sha256(b"one").hexdigest()[:12]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    return Desk(key_file=str(keys))


async def test_put_list_replace_delete(tmp_path: Path, desk: Desk) -> None:
    engine = Engine()
    async with serving(tmp_path / "a.sock", engine, desk) as caller:
        assert await caller.result("GET", "/v1/corpora") == []
        row = await caller.result("PUT", "/v1/corpora/my%20doc", {"text": "hello world"})
        assert (row["name"], row["key"], row["tokens"], row["ttl_left_s"]) == ("my doc", None, 10, None)
        assert (row["drafted"], row["hits"], row["kept_rate"]) == (0, 0, None)
        assert caller.console.generation == 2
        row = await caller.result("PUT", "/v1/corpora/ids", {"token_ids": [1, 2, 3], "key": KEY_ID, "ttl": 50})
        assert (row["key"], row["tokens"]) == (KEY_ID, 3)
        assert 49 < row["ttl_left_s"] <= 50
        engine.corpora.allowed(b"")[0].tally.add(4, 3)
        row = await caller.result("GET", "/v1/corpora/my%20doc")
        assert (row["drafted"], row["hits"], row["kept_rate"]) == (4, 3, 0.75)
        row = await caller.result("PUT", "/v1/corpora/my%20doc", data="new", headers={"Content-Type": "text/plain"})
        assert (row["tokens"], row["hits"]) == (3, 0)
        assert [row["name"] for row in await caller.result("GET", "/v1/corpora")] == ["my doc", "ids"]
        await caller.result("DELETE", "/v1/corpora/ids")
        assert await caller.refusal("DELETE", "/v1/corpora/ids") == (404, "not_found")
        assert await caller.refusal("GET", "/v1/corpora/ids") == (404, "not_found")


async def test_a_corpus_is_its_keys_own(tmp_path: Path, desk: Desk) -> None:
    engine = Engine()
    async with serving(tmp_path / "a.sock", engine, desk) as caller:
        await caller.result("PUT", "/v1/corpora/own", {"text": "hello", "key": KEY_ID})
        keys = caller.console.keys._keys
        own, other = keys.check("Bearer one"), keys.check("Bearer two")
        assert [corpus.name for corpus in engine.corpora.allowed(own)] == ["own"]
        assert engine.corpora.allowed(other) == engine.corpora.allowed(b"") == ()
        keys.replace(ApiKeys.from_file(desk.key_file))
        assert [corpus.name for corpus in engine.corpora.allowed(keys.check("Bearer one"))] == ["own"], "after a reload"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "missing_parameter"),
        ({"text": "a", "token_ids": [1]}, 400, "invalid_value"),
        ({"text": ""}, 400, "invalid_value"),
        ({"text": 1}, 400, "invalid_type"),
        ({"token_ids": [1, True]}, 400, "invalid_type"),
        ({"token_ids": [10**6]}, 400, "out_of_range"),
        ({"token_ids": [1, 2**63]}, 400, "out_of_range"),
        ({"text": "a", "ttl": 0}, 400, "out_of_range"),
        ({"text": "a", "key": "0" * 12}, 404, "not_found"),
        ({"text": "a", "tll": 5}, 400, "unknown_parameter"),
        ({"text": "a", "name": "b"}, 400, "invalid_value"),
        ({"text": "ab" * 501}, 409, "quota_exceeded"),
    ],
)
async def test_refusals(tmp_path: Path, desk: Desk, body: dict[str, Any], status: int, code: str) -> None:
    engine = Engine()
    async with serving(tmp_path / "a.sock", engine, desk) as caller:
        assert await caller.refusal("PUT", "/v1/corpora/x", body) == (status, code)
        assert await caller.result("GET", "/v1/corpora") == []


async def test_sizes_of_bodies(tmp_path: Path, desk: Desk) -> None:
    engine = Engine()
    engine.corpora = Corpora(engine.tokenizer, vocab_size=engine.info.vocab_size, max_tokens=1 << 23)
    plain = {"Content-Type": "text/plain"}
    async with serving(tmp_path / "a.sock", engine, desk) as caller:
        row = await caller.result("PUT", "/v1/corpora/x?ttl=9", data=io.BytesIO(b"a" * ((1 << 20) + 1)), headers=plain)
        assert row["tokens"] == (1 << 20) + 1
        assert row["ttl_left_s"] is not None
        too_long = io.BytesIO(b"a" * ((4 << 20) + 1))
        large_json = io.BytesIO(b'{"text": "' + b"a" * (1 << 20) + b'"}')
        kind = {"Content-Type": "application/json"}
        assert await caller.refusal("PUT", "/v1/corpora/x", data=large_json, headers=kind) == (413, "http_error")
        assert await caller.refusal("PUT", "/v1/corpora/x", data=too_long, headers=plain) == (413, "http_error")
        assert await caller.refusal("PUT", "/v1/corpora/x", data=b"\xff", headers=plain) == (400, "invalid_text")


async def test_without_drafts_nothing_is_taken(tmp_path: Path, desk: Desk) -> None:
    engine = Engine()
    engine.corpora = Corpora(engine.tokenizer, vocab_size=engine.info.vocab_size, max_tokens=0)
    async with serving(tmp_path / "a.sock", engine, desk) as caller:
        assert await caller.refusal("PUT", "/v1/corpora/x", {"text": "a"}) == (409, "conflict")


async def test_only_admins_may_and_no_text_is_logged(tmp_path: Path, desk: Desk) -> None:
    engine = Engine()
    with structlog.testing.capture_logs() as logs:
        async with serving(tmp_path / "a.sock", engine, desk) as caller:
            await caller.result("PUT", "/v1/corpora/x", {"text": "a secret"})
            for level in (Level.USER, Level.OPERATOR):
                caller.console.levels = _only(level)
                for method in ("GET", "PUT", "DELETE"):
                    assert await caller.refusal(method, "/v1/corpora/x", {"text": "a"}) == (403, "forbidden")
                assert await caller.refusal("GET", "/v1/corpora") == (403, "forbidden")
    lines = [line for line in logs if line["event"] == "admin_called"]
    assert lines[0]["command"] == "corpora-put"
    assert json.loads(lines[0]["arguments"]) == {"text": "<8>", "name": "x"}
    assert "secret" not in str(logs)


def _only(level: Level) -> Levels:
    levels = Levels(operators=os.getegid() if level is Level.OPERATOR else None)
    levels.admins = frozenset()
    return levels


def test_ctl(tmp_path: Path, desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "doc.txt"
    text.write_text("héllo", encoding="utf-8")
    with structlog.testing.capture_logs(), Served(tmp_path / "a.sock", desk) as served:
        assert served.ctl("corpora") == 0
        assert capsys.readouterr().out == "none\n"
        assert served.ctl("corpora", "put", "a/b", str(text), "--key", KEY_ID, "--ttl", "60", "--json") == 0
        row = json.loads(capsys.readouterr().out)
        assert (row["name"], row["tokens"], row["key"]) == ("a/b", 6, KEY_ID)
        assert served.ctl("corpora", "list") == 0
        assert "kept_rate" in capsys.readouterr().out
        assert served.ctl("corpora", "delete", "a/b", "--if-generation", "1") == 1
        assert "generation_mismatch" in capsys.readouterr().err
        assert served.ctl("corpora", "delete", "a/b") == 0
        assert served.ctl("corpora", "put", "x", str(tmp_path / "none")) == 1
        assert "cannot be read" in capsys.readouterr().err
