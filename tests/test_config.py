"""Configuration: order of sources, refusals that name place, key and range, and the reference file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from specd.config import Config, admin_socket_path
from specd.config_loader import load_config, options, parse_value, reference_toml
from specd.config_options import memory_bytes
from specd.errors import ConfigError

ROOT = Path(__file__).parents[1]


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "specd.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults_without_any_source() -> None:
    assert load_config(None, env={}) == Config()


def test_order_of_sources(tmp_path: Path) -> None:
    """Each source overrides the one before it, key by key."""
    file = write(tmp_path, "[server]\nport = 1\nhost = '127.0.0.2'\n[scheduler]\nmax_running = 3\nmax_tokens = 99\n")
    env = {"SPECD_SERVER__PORT": "2", "SPECD_SCHEDULER__MAX_RUNNING": "4"}
    flags = {"server.port": 4, "server.host": None}
    config = load_config(file, env=env, sets=["server.port=3", "kv.page_size=8"], flags=flags)
    assert config.server.port == 4
    assert load_config(file, env=env, sets=["server.port=3"]).server.port == 3
    assert load_config(file, env=env).server.port == 2
    assert load_config(file, env={}).server.port == 1
    assert config.server.host == "127.0.0.2"
    assert (config.scheduler.max_running, config.scheduler.max_tokens, config.kv.page_size) == (4, 99, 8)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("true", True),
        ("0.5", 0.5),
        ('"4"', "4"),
        ('["a", "b"]', ["a", "b"]),
        ("adaptive", "adaptive"),
        ("org/name", "org/name"),
        ("25%", "25%"),
        ("", ""),
        ("4\nother = 5", "4\nother = 5"),
        ("a = b", "a = b"),
    ],
)
def test_set_values_are_toml_or_literal(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_values_take_the_type_of_their_setting() -> None:
    config = load_config(None, env={}, sets=["server.drain_timeout_s=5", 'server.served_names=["a","b"]'])
    assert type(config.server.drain_timeout_s) is float
    assert config.server.served_names == ("a", "b")
    assert load_config(None, env={}, sets=["speculation.draft_len=4"]).speculation.draft_len == 4


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("server.prot=1", ["--set", "server.prot", "did you mean server.port?"]),
        ("sever.port=1", ["--set", "sever", "did you mean server?"]),
        ("model.port=1", ["model.port", "did you mean server.port?"]),
        ("port=1", ["port=1", "section.key=value"]),
        ("server.port", ["section.key=value"]),
        ("server.port=70000", ["server.port", "70000", "from 0 to 65535"]),
        ("server.port=true", ["server.port", "True", "a whole number"]),
        ("server.port=8.5", ["server.port", "8.5", "a whole number"]),
        ("server.port=eight", ["server.port", "'eight'", "from 0 to 65535"]),
        ("server.drain_timeout_s=nan", ["server.drain_timeout_s", "nan"]),
        ('server.host=""', ["server.host", "empty address"]),
        ("server.host=5", ["server.host", "5", "a string", "quote it"]),
        ("server.served_names=a", ["server.served_names", "a list of strings"]),
        ('server.served_names=["a", ""]', ["server.served_names", "empty"]),
        ("server.served_names=[1]", ["server.served_names", "a list of strings"]),
        ("model.dtype=int8", ["model.dtype", "'int8'", '"float32"']),
        ('model.path=""', ["model.path", "empty"]),
        ("model.offline=1", ["model.offline", "true or false"]),
        ("speculation.draft_len=fixed", ["speculation.draft_len", "'fixed'", '"adaptive"']),
        ("speculation.draft_len=65", ["speculation.draft_len", "65", "from 0 to 64"]),
        ("speculation.max_draft=0", ["speculation.max_draft", "0", "from 1 to 64"]),
        ("kv.memory=4 apples", ["kv.memory", "4 apples", "4GiB"]),
        ("kv.memory=0", ["kv.memory", "0"]),
        ("kv.memory=91%", ["kv.memory", "91%", "90%"]),
        ("log.level=loud", ["log.level", "'loud'", '"debug"']),
        ("sampling.temperature=2.5", ["sampling.temperature", "2.5", "from 0.0 to 2.0"]),
    ],
)
def test_refusals_say_where_what_and_what_is_allowed(item: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as failure:
        load_config(None, env={}, sets=[item])
    for word in words:
        assert word in str(failure.value)


def test_settings_that_contradict_each_other_are_refused() -> None:
    for sets in (
        ["speculation.draft_len=5", "speculation.max_draft=4"],
        ["speculation.ngram_min=6"],
        ["scheduler.max_running=600"],
    ):
        with pytest.raises(ConfigError, match=sets[0].partition("=")[0].replace(".", r"\.")):
            load_config(None, env={}, sets=sets)


def test_a_fixed_draft_length_must_fit_into_a_step() -> None:
    sets = ["speculation.draft_len=4", "scheduler.max_running=8", "scheduler.max_tokens=39"]
    with pytest.raises(ConfigError) as failure:
        load_config(None, env={}, sets=sets)
    for word in ("draft_len = 4", "max_running = 8", "needs 40", "max_tokens = 39"):
        assert word in str(failure.value)
    for allowed in ("scheduler.max_tokens=40", "speculation.draft_len=adaptive", "speculation.draft=none"):
        load_config(None, env={}, sets=[*sets, allowed])


def test_errors_name_the_source(tmp_path: Path) -> None:
    file = write(tmp_path, "[server]\nport = 'x'\n")
    with pytest.raises(ConfigError, match=str(file)):
        load_config(file, env={})
    with pytest.raises(ConfigError, match="SPECD_SERVER__PORT"):
        load_config(None, env={"SPECD_SERVER__PORT": "x"})
    with pytest.raises(ConfigError, match="--port"):
        load_config(None, env={}, flags={"server.port": "x"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sever]\n", ["sever", "server"]),
        ("port = 8000\n", ["port", "server.port"]),
        ("server = 1\n", ["server", "[server]"]),
        ("[server\n", ["TOML", "line 1"]),
        ("[server]\nport = 1\nport = 2\n", ["TOML"]),
        ("[server]\nport = " + "9" * 5000, ["TOML"]),
        ("[server]\nui_hosts = " + "[" * 5000 + "]" * 5000, ["TOML"]),
        ("[server]\ndrain_timeout_s = " + "9" * 400, ["server.drain_timeout_s", "86400"]),
        ("[server]\nmax_stop = " + "9" * 400, ["server.max_stop", "64"]),
        ("[kv]\nmemory = " + "9" * 400, ["kv.memory", "more memory than any machine has"]),
        ('[kv]\nmemory = "' + "9" * 400 + 'GiB"', ["kv.memory", "more memory than any machine has"]),
        ('[server]\napi_keys_file = "a\\u0000b"', ["server.api_keys_file", "zero character"]),
        ('[admin]\nadmins = ["a\\u0000b"]', ["admin.admins", "zero character"]),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as failure:
        load_config(write(tmp_path, text), env={})
    for word in words:
        assert word in str(failure.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml", env={})


def test_environment_names_of_others_are_left_alone() -> None:
    """Kubernetes sets SPECD_PORT for a service named specd; a double underscore is ours."""
    assert load_config(None, env={"SPECD_PORT": "tcp://10.0.0.1:80", "OTHER__X": "1"}) == Config()
    with pytest.raises(ConfigError, match="SPECD_SEVER__PORT"):
        load_config(None, env={"SPECD_SEVER__PORT": "1"})
    services = {"SPECD_SERVER_PORT": "tcp://10.0.0.1:80", "SPECD_SERVER_PORT_80_TCP_ADDR": "10.0.0.1"}
    services |= {"SPECD_SERVER_SERVICE_HOST": "10.0.0.1", "SPECD_SERVER_SERVICE_PORT_HTTP": "80"}
    assert load_config(None, env={**services, "SPECD_API_KEY": "k", "SPECD_KERNELS": "avx2"}) == Config()


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("SPECD_SERVER_PORT", "SPECD_SERVER__PORT"),
        ("SPECD_KV_PAGE_SIZE", "SPECD_KV__PAGE_SIZE"),
        ("SPECD_LOG_LEVLE", "SPECD_LOG__LEVLE"),
    ],
)
def test_a_single_underscore_is_refused_with_the_right_spelling(name: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: .*{right}$"):
        load_config(None, env={name: "9000"})


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("auto", None),
        (4096, 4096),
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("25%", 250),
    ],
)
def test_memory_sizes(value: int | str, size: int | None) -> None:
    assert memory_bytes(value, ram_bytes=1000) == size


def test_admin_socket_path(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"RUNTIME_DIRECTORY": "/run/specd/a:/run/other", "XDG_RUNTIME_DIR": "/run/user/1"}
    assert admin_socket_path("/x/a.sock", env) == Path("/x/a.sock")
    assert admin_socket_path("", env) == Path("/run/specd/a/admin.sock")
    del env["RUNTIME_DIRECTORY"]
    assert admin_socket_path("", env) == Path("/run/user/1/specd/admin.sock")
    monkeypatch.setattr("os.getuid", lambda: 7)
    assert admin_socket_path("", {}).parts[-2:] == ("specd-7", "admin.sock")


def test_every_setting_is_described_and_its_default_is_allowed() -> None:
    assert [field.name for field in dataclasses.fields(Config)] == [
        "server", "model", "speculation", "sampling", "chat", "scheduler", "kv", "admin", "log",
        "telemetry",
    ]  # fmt: skip
    for option in options():
        meta = option.field.metadata
        assert set(meta) == {"default", "doc", "unit", "range", "reloadable", "flag", "check"}, option.key
        assert meta["doc"], option.key
        assert option.describe(), option.key


def test_the_reference_file_is_current_and_is_the_defaults() -> None:
    """config/specd.toml is written by `reference_toml()`; write it again after a change of config.py."""
    assert (ROOT / "config" / "specd.toml").read_text(encoding="utf-8") == reference_toml()
    assert load_config(ROOT / "config" / "specd.toml", env={}) == Config()
    for option in options():
        assert f"{option.field.name} =" in reference_toml()
