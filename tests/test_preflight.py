"""What is wrong with a configuration is said before anything is loaded, and its exit code is 78."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import structlog

from specd import cli
from specd.config import Config, ModelConfig, SpeculationConfig
from specd.config_loader import load_config
from specd.config_options import check_draft
from specd.daemon import load_engine
from specd.drafters.registry import parse_draft
from specd.errors import ConfigError, DraftError, FetchError, SpecdError
from tests.tiny import write_hf_folder

NO_SUCH = "no such file or folder"
LONG = "x" * 300


@pytest.mark.parametrize(
    ("model", "draft", "message"),
    [
        ({"path": "/nope/x"}, "auto", f"^/nope/x: {NO_SUCH}"),
        ({"path": "./nope.gguf"}, "auto", f"^./nope.gguf: {NO_SUCH}"),
        ({"path": "{folder}"}, "auto", "not a model folder: it holds no config.json"),
        ({"path": "org/none", "offline": True}, "auto", "'org/none' is not available: .* `specd fetch org/none`"),
        ({"revision": "v1"}, "auto", "only a hub id"),
        ({"chat_template": "{folder}/none"}, "auto", "model.chat_template: .*/none cannot be read: No such file"),
        ({"chat_template": "{folder}/bad"}, "auto", "model.chat_template: .*/bad: .* does not compile"),
        ({"chat_template": "{folder}/pipe"}, "auto", "model.chat_template: .*/pipe is not a regular file"),
        ({"path": LONG}, "auto", "^x+: File name too long"),
        ({}, f"mtp:{LONG}", "^x+/config.json: File name too long"),
        ({}, f"lm:{LONG}", "^x+: File name too long"),
        ({}, "mtp:{folder}", "speculation.draft is 'mtp:.*: it holds no config.json"),
        ({}, "lm:/nope", f"speculation.draft is 'lm:/nope': /nope: {NO_SUCH}"),
        ({"offline": True}, "lm:org/none@v2", "revision 'v2' of it is not .* `specd fetch org/none --revision v2`"),
    ],
)
async def test_nothing_is_loaded(
    model: dict[str, Any], draft: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of aliases stand for files that are there: what is asked for besides is what is wrong."""
    (tmp_path / "bad").write_text("{% if %}")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "target.gguf").write_bytes(b"GGUF")
    if "revision" not in model:
        model = {"path": str(tmp_path / "target.gguf")} | model
    model = {key: value.format(folder=tmp_path) if isinstance(value, str) else value for key, value in model.items()}
    config = Config(model=ModelConfig(**model), speculation=SpeculationConfig(draft=draft.format(folder=tmp_path)))

    def load(name: str, package: str | None = None) -> Any:
        assert name != "specd.engine", "nothing is loaded"
        return import_module(name, package)

    monkeypatch.setattr("importlib.import_module", load)
    with pytest.raises(SpecdError, match=message) as caught:
        await load_engine(config)
    assert caught.value.code in ("config_error", "model_error")
    assert not isinstance(caught.value, FetchError)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "holds no tokenizer"),
        ("tokenizer.json", "{}", "its tokenizer cannot be loaded"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json: eos_token_id must be"),
        ("config.json", '{"architectures": ["LlamaForCausalLM"]}', "config.json: hidden_size is missing"),
        ("config.json", "{", "config.json: cannot be read"),
        ("model.safetensors", "", "model.safetensors: "),
        ("model.safetensors", None, "holds no .safetensors file"),
    ],
)
def test_a_damaged_folder_exits_78_and_names_it(
    file: str, content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_hf_folder(tmp_path / "model")
    (folder / file).unlink()
    (folder / "tokenizer_config.json").unlink()
    if content is not None:
        (folder / file).write_text(content)
    try:
        assert cli.main(["check", str(folder), "--max-len", "32"]) == 78
    finally:
        structlog.reset_defaults()  # the command configures the log
    said = capsys.readouterr().err
    assert f"specd: {folder}" in said
    assert message in said


@pytest.mark.parametrize(
    "text",
    ["auto", "none", "ngram", "mtp", "mtp+ngram", "lm", "layers:3", "lm:org/a@b", "mtp:/x:y"],
)
def test_drafters_that_can_be_spelt(text: str) -> None:
    check_draft(text)
    assert parse_draft(text).kind in text


@pytest.mark.parametrize(
    "text", ["nonsense", "", "layers:0", "layers:x", "layers", "lm:", "mtp:", "mtp:builtin", "Auto"]
)
def test_drafters_that_cannot(text: str) -> None:
    with pytest.raises(DraftError):
        parse_draft(text)
    with pytest.raises(ConfigError):
        check_draft(text)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model.quantize=q8_0", "model.kernels=torch"], 'model.kernels = "torch" rules them out'),
        (["model.dtype=bfloat16", "model.kernels=native"], 'with model.kernels = "native": .*float32'),
        (["model.dtype=bfloat16", "model.quantize=q8_0"], 'with model.quantize = "q8_0": .*float32'),
    ],
)
def test_settings_that_contradict(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, env={}, sets=sets)


@pytest.mark.parametrize("setting", ["model.path", "server.journal", "admin.socket"])
def test_a_home_that_nobody_has(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting}.*'~nobody-here/x'.*home folder"):
        load_config(None, env={}, sets=[f"{setting}=~nobody-here/x"])
