"""Chats that are finished, one line of JSON each, until all of them are there and become a corpus."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import orjson

from specd.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    ids: list[int]
    role: list[int]  # of each token, as in a corpus
    temperature: float  # of the answers


class Journal:
    """The first line is what the run was started with. A line that a crash cut short is dropped and written again."""

    def __init__(self, path: Path, file: IO[bytes], chats: dict[int, Chat]) -> None:
        self._path, self._file = path, file
        self.chats = chats  # by number

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any]) -> Journal:
        """A new one, or what is there. Raises ConfigError for that of other settings, naming the first that differs."""
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # behind the last newline: a torn line
        chats: dict[int, Chat] = {}
        try:
            found = orjson.loads(lines[0]) if lines else dict(identity)
            if not isinstance(found, dict):
                raise TypeError(f"the first line is {type(found).__name__}, not an object")
            for line in lines[1:]:
                record = orjson.loads(line)
                chat = Chat(record["ids"], record["role"], record["temperature"])
                if not 0 < len(chat.ids) == len(chat.role):
                    raise ValueError(f"{len(chat.ids)} ids and {len(chat.role)} roles")
                chats[record["chat"]] = chat
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: not a journal of chats: {error!r}; remove it to begin anew") from error
        for name, value in identity.items():
            if found.get(name) != value:
                raise ConfigError(
                    f"{path}: was begun with {name} {found.get(name)!r}, not {value!r}; give the same settings, or "
                    "remove it to begin anew"
                )
        whole = b"".join(line + b"\n" for line in lines or [orjson.dumps(dict(identity))])
        if not path.exists() or path.read_bytes() != whole:
            partial = path.with_suffix(".partial")
            partial.write_bytes(whole)
            partial.replace(path)
        return cls(path, path.open("ab", buffering=0), chats)

    def add(self, number: int, chat: Chat) -> None:
        """On disk, as far as a crash of this process goes, when it returns."""
        self.chats[number] = chat
        self._file.write(orjson.dumps({"chat": number, **dataclasses.asdict(chat)}) + b"\n")

    def remove(self) -> None:
        self._path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
