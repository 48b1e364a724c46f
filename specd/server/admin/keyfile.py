"""API keys while the daemon runs: listed, added and taken away in `server.api_keys_file`. Only hashes are stored."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
import time
from pathlib import Path

from specd.config_loader import check_rereadable
from specd.errors import ConfigError, RequestError
from specd.server.auth import KEY_ID_LEN, ApiKeys, entry_of

_NOTE = re.compile(r"# key ([0-9a-f]{12}) \S+ (.+)")  # written above a key that was made here


class KeyFile:
    """The file of `server.api_keys_file` and the keys that are let in. A change is in the file before it counts."""

    def __init__(self, keys: ApiKeys, path: str) -> None:
        self._keys = keys
        self.path = path

    def entries(self) -> list[dict[str, object]]:
        """What is let in: id (the first digits of the SHA-256), name, weight, and how the file holds it."""
        notes = [match for line in self._lines() if (match := _NOTE.fullmatch(line))]
        names = {match[1]: match[2] for match in notes}
        found = []
        for line in self._lines():
            if (key := self._key(line)) is not None:
                stored = "hash" if line.startswith("sha256:") else "plain text"
                found.append({"id": key[0], "name": names.get(key[0]), "weight": key[1], "stored": stored})
        return found

    def salt(self, key_id: str) -> bytes:
        """What separates this key's caches from the others'. Raises RequestError when there is no such key."""
        salt = self._keys.salt_of(key_id)
        if salt is None:
            raise RequestError(f"there is no key {key_id!r}", code="not_found", param="key")
        return salt

    def add(self, name: str) -> dict[str, object]:
        """A new key: this is the only time that it is shown. Raises RequestError when the file cannot be written."""
        if not self.path:
            raise RequestError("server.api_keys_file is not set: nobody is asked for a key", code="conflict")
        key = "sk-" + secrets.token_urlsafe(32)
        digest = hashlib.sha256(key.encode()).hexdigest()
        today = time.strftime("%Y-%m-%d", time.gmtime())
        self._write([*self._lines(), f"# key {digest[:KEY_ID_LEN]} {today} {name}", f"sha256:{digest}"])
        return {"id": digest[:KEY_ID_LEN], "name": name, "key": key}

    def remove(self, key_id: str) -> dict[str, object]:
        """Raises RequestError when there is no such key, or no other one: an empty file must not open the server."""
        ids = [entry["id"] for entry in self.entries()]
        if key_id not in ids:
            raise RequestError(f"there is no key {key_id[:64]!r}", code="not_found")
        if set(ids) == {key_id}:
            raise RequestError("it is the last key; add another one first", code="conflict")
        self._write([line for line in self._lines() if not self._is_of(line, key_id)])
        return {"id": key_id, "removed": True}

    def _is_of(self, line: str, key_id: str) -> bool:
        note, key = _NOTE.fullmatch(line), self._key(line)
        return (note is not None and note[1] == key_id) or (key is not None and key[0] == key_id)

    def _key(self, line: str) -> tuple[str, int] | None:
        """(id, weight) of a line; None of a comment."""
        if not line or line.startswith("#"):
            return None
        digest, weight = entry_of(line, self.path)
        return digest.hex()[:KEY_ID_LEN], weight

    def _lines(self) -> list[str]:
        """Stripped ones. Raises ConfigError."""
        if not self.path:
            return []
        check_rereadable(Path(self.path), "server.api_keys_file")
        try:
            return [line.strip() for line in Path(self.path).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"server.api_keys_file: cannot read {self.path}: {error}") from error

    def _write(self, lines: list[str]) -> None:
        """The file whole or not at all, then the keys of this process."""
        path = Path(self.path).resolve()
        temporary = None
        try:
            mode = path.stat().st_mode & 0o777
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
                temporary = Path(file.name)
                file.write("\n".join(lines) + "\n")
                os.fchmod(file.fileno(), mode)
                file.flush()
                os.fsync(file.fileno())
            fresh = ApiKeys.from_file(str(temporary))
            temporary.replace(path)
        except OSError as error:
            raise RequestError(
                f"server.api_keys_file: {path} cannot be written ({error.strerror}); change it by hand, then reload "
                "(a credential of systemd is read again only after a restart)",
                code="conflict",
            ) from error
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
        self._keys.replace(fresh)
