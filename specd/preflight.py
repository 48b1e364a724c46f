"""What can be said of a configuration before anything is loaded, so that a slip costs no minutes of loading. No torch.

What only the model can tell (more `layers:N` than it has, a head of another model) is told by the load itself.
"""

from __future__ import annotations

from pathlib import Path

from specd.config import Config
from specd.errors import ConfigError, ModelError
from specd.models import fetch
from specd.server.chat import ChatTemplate


def check_before_load(config: Config) -> None:
    """Blocks for a moment. Raises ConfigError or ModelError (exit code 78)."""
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
    try:
        ChatTemplate(fetch.read_template(path), bos_token="", eos_token="", special_tokens=())
    except ModelError as error:
        raise ConfigError(f"model.chat_template: {path}: {error}") from error


def _check_model(name: str, revision: str, *, offline: bool) -> None:
    path = fetch.look_up(name, revision=revision or None, offline=offline)
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{path}: not a model folder: it holds no config.json")
