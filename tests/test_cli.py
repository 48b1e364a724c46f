"""The command line: settings, exit codes, generated text on a terminal, tables."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from specd import cli
from specd.commands import check, generate
from specd.commands.settings import load_settings
from specd.commands.tables import table
from specd.config import Config
from specd.detokenizer import LeadingSpace
from specd.errors import AddressInUseError, EngineError, FetchError, ModelError, SpecdError, UsageError
from specd.request import FinishReason, Request, SequenceDelta, SequenceStats, TokenOrigin
from tests.daemons import INFO

T, D, N, B = TokenOrigin.TARGET, TokenOrigin.DRAFT, TokenOrigin.NGRAM, TokenOrigin.BONUS
STATS = SequenceStats(
    prompt_tokens=7,
    cached_tokens=0,
    completion_tokens=21,
    num_spec_steps=3,
    num_draft_tokens=8,
    num_accepted_tokens=4,
    acceptance_histogram=(1, 1, 0, 1),
    per_step_drafted=(3, 3, 2),
    per_step_accepted=(3, 1, 0),
    num_preemptions=0,
    queue_s=0.0,
    ttft_s=0.5,
    total_s=2.5,
)


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings of the person who runs the tests stay out, and the commands' log configuration stays in."""
    for name in [name for name in os.environ if name.startswith("SPECD_")]:
        monkeypatch.delenv(name)
    yield
    structlog.reset_defaults()


def settings(*words: str) -> Config:
    return load_settings(cli.build_parser().parse_args(["serve", *words]))


def test_every_flag_is_a_setting(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[server]\nport = 1\n")
    words = "/m.gguf --draft layers:4 --host ::1 --port 9 --max-len 512 --threads 2 --dtype bfloat16"
    words += " --served-name a --served-name b --api-key-file k --max-draft 6 --chat-template t --revision r --offline"
    config = settings(*words.split(), "--config", str(tmp_path / "c.toml"), "--set", "kv.page_size=1")
    assert (config.model.path, config.model.revision, config.model.chat_template) == ("/m.gguf", "r", "t")
    assert (config.model.max_len, config.model.threads, config.model.dtype) == (512, 2, "bfloat16")
    assert (config.model.offline, config.server.served_names) == (True, ("a", "b"))
    assert (config.server.host, config.server.port, config.server.api_keys_file) == ("::1", 9, "k")
    assert (config.speculation.draft, config.speculation.max_draft, config.kv.page_size) == ("layers:4", 6, 1)


def test_no_flag_is_the_default() -> None:
    assert settings() == Config()


def test_text_flags_are_never_read_as_toml() -> None:
    assert settings("123", "--revision", "456").model == Config().model.__class__(path="123", revision="456")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--port", "eight"], "--port: server.port = 'eight'"),
        (["serve", "--set", "server.prot=1"], "did you mean server.port?"),
        (["check", "--max-draft", "0"], "--max-draft: speculation.max_draft = 0"),
        (["generate", "--config", "/no/such.toml", "hi"], "/no/such.toml"),
        (["serve", "--draft", "nonsense"], "--draft: speculation.draft: 'nonsense' is no drafter"),
    ],
)
def test_wrong_settings_exit_78(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 78
    assert message in capsys.readouterr().err


def test_wrong_usage_exits_2() -> None:
    for words in (["serve", "--nonsense"], [], ["ctl"], ["fetch"], ["generate", "x", "--port", "1"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "a", "b", "c"], "quote the prompt"),
        (["bench", "--find-rate"], "needs an objective"),
        (["train", "mtp", "m", "--shards", "s", "-o", "o", "--lr", "0"], "--lr 0.0: must be above 0"),
        (["ctl", "abort"], "give ids"),
    ],
)
def test_what_argparse_cannot_see_is_wrong_usage_too(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    command = " ".join(words[:2]) if words[0] in ("train", "ctl") else words[0]
    assert said.startswith(f"usage: specd {command} ")
    assert f"specd {command}: error: " in said
    assert message in said


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("m"), 78),
        (FetchError("f"), 1),  # a later try may succeed
        (AddressInUseError("a"), 1),  # so may this one
        (EngineError("e"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Config, **_: Any) -> Any:
        raise error

    monkeypatch.setattr("specd.commands.serve.serve", fail)
    assert cli.main(["serve"]) == code


def test_ctl_without_a_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ctl", "--socket", str(tmp_path / "none.sock"), "status"]) == 69
    assert "none.sock" in capsys.readouterr().err


class FakeTokenizer:
    """One token a letter: id = code point. 0 is the end."""

    special_ids = frozenset({0})
    special_tokens = ("<end>",)
    leading_space = LeadingSpace.KEEP
    vocab_size = 128
    bos_token, eos_token = "", "<end>"
    chat_template: str | None = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"

    def token_bytes(self, token_id: int) -> bytes:
        assert token_id < self.vocab_size
        return chr(token_id).encode()

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def encode_chat(self, rendered: Any) -> list[int]:
        return self.encode(rendered.text)


def delta(text: str, *origins: TokenOrigin, finish: FinishReason | None = None) -> SequenceDelta:
    """Deltas whose text is released at once."""
    return SequenceDelta(
        request_id="r",
        index=0,
        token_ids=tuple(ord(char) for char in text),
        text=text,
        origins=tuple((origin, 0, i) for i, origin in enumerate(origins)),
        finish_reason=finish,
        stats=STATS if finish else None,
    )


class FakeEngine:
    info = INFO

    def __init__(self, finish: FinishReason = FinishReason.STOP) -> None:
        self.tokenizer = FakeTokenizer()
        self.requests: list[Request] = []
        self.finish = finish
        self.closed = False

    async def submit(self, request: Request) -> AsyncIterator[SequenceDelta]:
        self.requests.append(request)
        yield delta("he", T, N)
        yield delta("y", B, finish=self.finish)

    def abort(self, request_id: str) -> bool:
        return False

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()

    async def load(config: Config) -> FakeEngine:
        return fake

    monkeypatch.setattr(generate, "load_engine", load)
    monkeypatch.setattr(check, "load_engine", load)
    return fake


def test_generate_streams_and_sums_up(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "hello"]) == 0
    out, err = capsys.readouterr()
    assert out == "hey\n"
    assert err.startswith("loading smollm2-135m\n")
    assert "10.0 tokens/s" in err  # 20 tokens after the first, in the 2 s after it
    assert "1: 67% (2/3), 2: 33% (1/3), 3: 50% (1/2)" in err
    (request,) = engine.requests
    assert "".join(map(chr, request.prompt_ids)) == "[user]hello"
    assert request.sampling.greedy
    assert request.sampling.max_tokens == INFO.max_len - len("[user]hello")
    assert engine.closed


def test_generate_options(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--raw", "--temperature", "0.5", "--seed", "3", "--max-tokens", "4"]
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert cli.main(["generate", "some/model", "-", *words]) == 0
    (request,) = engine.requests
    assert "".join(map(chr, request.prompt_ids)) == "from a pipe"
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.max_tokens) == (0.5, 3, 4)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "-0.1"),
        ("--temperature", "2.1"),
        ("--temperature", "nan"),
        ("--max-tokens", "0"),
        ("--max-tokens", "1.5"),
        ("--seed", "9223372036854775808"),
    ],
)
def test_generation_options_have_the_limits_of_a_request(
    option: str, value: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["generate", "x"], ["chat"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*command, f"{option}={value}"])
        assert option in capsys.readouterr().err
    assert not engine.requests


def test_generate_refuses_what_does_not_fit(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "x" * 100]) == 1
    assert "maximum context length is 64" in capsys.readouterr().err
    assert engine.closed


def test_generate_without_a_template(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.tokenizer.chat_template = None
    assert cli.main(["generate", "x"]) == 78
    assert "--raw" in capsys.readouterr().err
    assert cli.main(["generate", "--raw", "x"]) == 0


def test_generate_tells_a_failure(engine: FakeEngine) -> None:
    engine.finish = FinishReason.ERROR
    assert cli.main(["generate", "x"]) == 1


def test_chat_keeps_the_conversation(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[Any] = ["hi", "", "bye", EOFError()]

    def ask(prompt: str) -> str:
        line = lines.pop(0)
        if isinstance(line, EOFError):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", ask)
    assert cli.main(["chat"]) == 0
    prompts = ["".join(map(chr, request.prompt_ids)) for request in engine.requests]
    assert prompts == ["[user]hi", "[user]hi[assistant]hey[user]bye"]
    assert capsys.readouterr().out == "hey\nhey\n\n"


def test_chat_survives_one_interrupt_at_the_prompt(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[Any] = ["hi", KeyboardInterrupt(), "bye", KeyboardInterrupt(), KeyboardInterrupt(), "never"]

    def ask(prompt: str) -> str:
        line = lines.pop(0)
        if isinstance(line, KeyboardInterrupt):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", ask)
    assert cli.main(["chat"]) == 0
    assert lines == ["never"]
    prompts = ["".join(map(chr, request.prompt_ids)) for request in engine.requests]
    assert prompts == ["[user]hi", "[user]hi[assistant]hey[user]bye"]
    assert "Ctrl-C again" in capsys.readouterr().err


def test_check_prints_the_plan(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.info = dataclasses.replace(INFO, kernels="native fast", kv_bytes=23_500_000)
    assert cli.main(["check"]) == 0
    out = capsys.readouterr().out
    for words in ("ngram, at most 4 drafts", "native fast: int8", "1,024 tokens", "at most 23.5 MB"):
        assert words in out
    assert engine.closed


def test_check_refuses_what_serve_would(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("", "not-a-host.invalid"):
        assert cli.main(["check", "--host", host]) == 78
        assert "server.host" in capsys.readouterr().err
    engine.tokenizer.chat_template = "{% if %}"
    assert cli.main(["check"]) == 78
    assert "does not compile" in capsys.readouterr().err
    assert engine.closed


def test_check_exits_78_whatever_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def fail(config: Config) -> Any:
        raise FetchError("not there")

    monkeypatch.setattr(check, "load_engine", fail)
    assert cli.main(["check"]) == 78
    assert cli.main(["check", "--api-key-file", str(tmp_path / "none")]) == 78


def test_fetch_prints_the_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {}

    def resolve(name: str, **options: Any) -> Path:
        asked.update(options, name=name)
        return Path("/cache/x.gguf")

    monkeypatch.setattr("specd.models.fetch.resolve", resolve)
    assert cli.main(["fetch", "smollm2-135m", "--revision", "r"]) == 0
    assert capsys.readouterr().out == "/cache/x.gguf\n"
    assert asked == {"name": "smollm2-135m", "revision": "r"}


@pytest.mark.parametrize("words", [["foo"], ["smollm2-135m", "--revision", "r"]])
def test_fetch_of_what_cannot_be_had_is_permanent(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch", *words]) == 78
    assert words[0] in capsys.readouterr().err


def test_tables() -> None:
    records = [{"request_id": "a", "age_s": 1.25, "pages": 3}, {"request_id": "long", "age_s": 10.0, "pages": None}]
    assert table(records) == "request_id  age_s  pages\na           1.25   3\nlong        10     -"
    assert table([]) == "none"
    assert table({"a": {"b": 1, "c": [1, 2]}, "long": True}) == "a.b   1\na.c   1, 2\nlong  yes"


def test_main_reports_other_errors_as_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise SpecdError("odd")

    monkeypatch.setattr("specd.commands.fetch.run", fail)
    assert cli.main(["fetch", "x"]) == 1


@pytest.mark.parametrize("words", [["--json", "status"], ["status", "--json"], ["shutdown", "--now", "--json"]])
def test_json_output(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("specd.commands.ctl_client.Client.call", lambda *args: {"state": "ready"})
    assert cli.main(["ctl", *words]) == 0
    assert json.loads(capsys.readouterr().out) == {"state": "ready"}


def test_tables_without_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("specd.commands.ctl_client.Client.call", lambda *args: {"state": "ready"})
    assert cli.main(["ctl", "status"]) == 0
    assert capsys.readouterr().out == "state  ready\n"


def test_the_words_of_generate() -> None:
    args = argparse.Namespace(words=["m", "p"])
    assert generate._split_words(args) == "p"
    assert args.model == "m"
    with pytest.raises(UsageError):
        generate._split_words(argparse.Namespace(words=["m", "p", "q"]))
