"""`specd train VERB --config FILE`: a TOML file with a table for each verb, whose keys are the verb's own options.

    [mtp]
    shards = "shards"
    draft-vocab = 16384
    without = ["input_norm"]

The file's options are put before the command line's own, so the command line wins; a list that it gives takes the
file's place. Paths are relative to the working directory, as on the command line. No torch.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specd.errors import ConfigError


class RecipeParser(argparse.ArgumentParser):
    """A verb's parser. What is wrong with a recipe is wrong usage: exit code 2, naming the file and the key."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)

    def add_recipe(self) -> None:
        """The option --config; it reads the table of the verb's name."""
        self.add_argument(
            "--config", type=Path, metavar="FILE", help="TOML with a table of these options; the command line wins"
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        path = _recipe_path(args or ())
        if path is not None and "--config" in self._option_string_actions:
            verb = self.prog.split()[-1]
            try:
                args = [*self._words(path, verb, args), *args]
            except ConfigError as error:
                self.error(str(error))
        return super().parse_known_args(args, namespace)

    def _words(self, path: Path, verb: str, given: Sequence[str]) -> list[str]:
        words: list[str] = []
        for key, value in read_table(path, verb).items():
            option = f"--{key.replace('_', '-')}"
            action = self._option_string_actions.get(option)
            if action is None or option in ("--config", "--help"):
                known = sorted(name[2:] for name in self._option_string_actions if name.startswith("--"))
                raise ConfigError(f"{path}: [{verb}] {key}: no such option; it has {', '.join(_own(known))}")
            repeated = isinstance(action, argparse._AppendAction)
            if isinstance(value, list) != repeated:
                raise ConfigError(f"{path}: [{verb}] {key}: {value!r} is {'not ' if repeated else ''}a list")
            if repeated and any(word in action.option_strings or word.startswith(f"{option}=") for word in given):
                continue
            words += _as_words(option, value, action)
        return words


def _as_words(option: str, value: Any, action: argparse.Action) -> list[str]:
    if isinstance(value, bool):
        if action.nargs != 0:
            raise ConfigError(f"{option}: {str(value).lower()} where a value is needed")
        return [option] if value else []
    if action.nargs == 0:
        raise ConfigError(f"{option}: {value!r}, it is true or false")
    return [f"{option}={part}" for part in (value if isinstance(value, list) else [value])]


def read_table(path: Path, verb: str) -> Mapping[str, Any]:
    """The verb's table. Raises ConfigError for a file that cannot be read or has no table of that name."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not a recipe: {error}") from error
    table = data.get(verb)
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: has no table [{verb}]; it has {', '.join(data) or 'nothing'}")
    return table


def _recipe_path(words: Iterable[str]) -> Path | None:
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    reader.add_argument("--config", type=Path)
    try:
        path: Path | None = reader.parse_known_args(list(words))[0].config
    except argparse.ArgumentError:  # --config without a value: the verb's own parser says so
        return None
    return path


def _own(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in ("config", "help")]
