"""What can be said of a configuration before anything is loaded, so that a slip costs no minutes of loading. No torch.

What only the model can tell (more `layers:N` than it has, a head of another model) is told by the load itself.
"""

from __future__ import annotations

from pathlib import Path

from specd.config import Config
from specd.config_loader import check_rereadable
from specd.errors import ConfigError, ModelError
from specd.models import fetch
from specd.server.chat import ChatTemplate


def check_before_load(config: Config) -> None:
    """Blocks for a moment. Raises ConfigError or ModelError (exit code 78)."""
    try:
        _check(config)
    except OSError as error:  # a name that no file can have, or a folder that nobody may look into
        raise ConfigError(f"{error.filename}: {error.strerror}") from error


def _check(config: Config) -> None:
    model, draft = config.model, config.speculation.draft
    if model.chat_template:
        _check_template(Path(model.chat_template))
    _check_model(model.path, model.revision, offline=model.offline)
    kind, _, argument = draft.partition(":")
    if kind == "mtp" and argument and not Path(argument, "config.json").is_file():
        raise ConfigError(f"speculation.draft is {draft!r}: {argument} is no head's folder: it holds no config.json")
    if kind == "lm" and argument:
        try:
            _check_model(*fetch.split_revision(argument), offline=model.offline)
        except ModelError as error:
            raise ConfigError(f"speculation.draft is {draft!r}: {error}") from error


def _check_template(path: Path) -> None:
    check_rereadable(path, "model.chat_template")  # the load reads it again
    try:
        ChatTemplate(fetch.read_template(path), bos_token="", eos_token="", special_tokens=())
    except ModelError as error:
        raise ConfigError(f"model.chat_template: {path}: {error}") from error


def _check_model(name: str, revision: str, *, offline: bool) -> None:
    path = fetch.look_up(name, revision=revision or None, offline=offline)
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{path}: not a model folder: it holds no config.json")
