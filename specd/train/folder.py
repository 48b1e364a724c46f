"""The output folder of a training run, in which only the first rank writes.

`log.jsonl` has a line for each step and each look at held-out sequences; `checkpoint.safetensors` is where the run
stands; `head/` (or `model/`, of a draft model) is the best so far, whole at any time.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from specd.errors import ConfigError


class RunFolder:
    """See the module. Every method is without effect where writes is False."""

    def __init__(self, path: Path, *, best: str, writes: bool) -> None:
        """best: name of the folder of the best model so far; put back where a crash left it under another.

        Raises ConfigError for a folder that cannot be made.
        """
        self._path, self._best, self._writes = path, path / best, writes
        self._old = path / f"{best}.old"
        self.checkpoint = path / "checkpoint.safetensors"
        if writes:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--output {path}: cannot be made: {error}") from error
            if self._old.exists() and not self._best.exists():
                self._old.rename(self._best)

    def begin(self, step: int | None) -> None:
        """Drops the log's lines of steps after that one, all of them for None: they will be made again.

        So is a line that a crash or a full disk cut short. Raises ConfigError for a log that is none.
        """
        path = self._path / "log.jsonl"
        if not self._writes or not path.exists():
            return
        lines = path.read_bytes().split(b"\n")[:-1]  # behind the last newline: a torn line
        try:
            kept = [line for line in lines if step is not None and orjson.loads(line)["step"] <= step]
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not the log of a training run: {error!r}") from error
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"".join(line + b"\n" for line in kept))
        partial.replace(path)

    def log(self, record: Mapping[str, Any]) -> None:
        if self._writes:
            with (self._path / "log.jsonl").open("ab") as file:
                file.write(orjson.dumps(record) + b"\n")

    def say(self, text: str) -> None:
        """To standard error."""
        if self._writes:
            print(text, file=sys.stderr, flush=True)

    def replace(self, write: Callable[[Path], None], provenance: Mapping[str, Any]) -> None:
        """Replaces the best model by what write puts into a fresh folder, and provenance.json."""
        if not self._writes:
            return
        partial = self._path / f"{self._best.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        versions = {package: version(package) for package in ("specd", "torch")}
        data = {"command": [without_place(word) for word in sys.argv], "versions": versions, **provenance}
        (partial / "provenance.json").write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n")
        shutil.rmtree(self._old, ignore_errors=True)
        if self._best.exists():
            self._best.rename(self._old)
        partial.rename(self._best)
        shutil.rmtree(self._old, ignore_errors=True)


def without_place(value: Any) -> Any:
    """An absolute path, or an option's, is its last part alone: machines keep their files elsewhere."""
    if not isinstance(value, str):
        return value
    option, equals, place = value.rpartition("=")
    return f"{option}{equals}{Path(place).name}" if place.startswith("/") else value
