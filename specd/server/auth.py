"""API keys. A route is closed unless it is one of the open ones: nothing depends on how a path is spelled."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from specd.errors import ConfigError, RequestError

KEY_ID_LEN = 12  # hexadecimal digits of the hash that name a key
_HASHED = "sha256:"
_WEIGHT = re.compile(r"(\S+)\s+weight=([0-9]{1,4})")


class ApiKeys:
    """SHA-256 digests of the keys that are let in, each with its weight in the queue; no keys = everybody is."""

    def __init__(self, weights: Mapping[bytes, int] | None = None) -> None:
        self._digests = tuple(weights or ())
        self._secret = secrets.token_bytes(32)
        self._weights = {self._salt(digest): weight for digest, weight in (weights or {}).items()}

    @classmethod
    def from_file(cls, path: str) -> ApiKeys:
        """One key a line, or `sha256:HEX` of one, and after it perhaps ` weight=N` (1 to 1000, else 1).

        Blank lines and lines that begin with # are skipped.

        Raises ConfigError when it cannot be read or holds no key: an empty file must not open the server.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"server.api_keys_file: cannot read {path}: {reason}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise ConfigError(f"server.api_keys_file: {path} has no key; write one a line, or unset the setting")
        return cls(dict(entry_of(key, path) for key in keys))

    @classmethod
    def configured(cls, path: str) -> ApiKeys:
        """Those of `server.api_keys_file`; none are asked for when it is empty. Raises ConfigError."""
        return cls.from_file(path) if path else cls()

    def replace(self, other: ApiKeys) -> None:
        """Lets the other's keys in instead. A key that stays keeps its salt, hence its caches."""
        self._digests = other._digests
        self._weights = {self._salt(digest): other._weights[other._salt(digest)] for digest in other._digests}

    def check(self, authorization: str | None) -> bytes:
        """Lets a request in and gives the salt that separates this key's caches from the others' (b"" without keys).

        Raises RequestError(invalid_api_key). Every stored key is compared, in constant time.
        """
        if not self._digests:
            return b""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise RequestError("a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")
        return self._salt(digest)

    def weight(self, salt: bytes) -> int:
        """The share of the queue of the key whose salt `check` gave."""
        return self._weights.get(salt, 1)

    def salt_of(self, key_id: str) -> bytes | None:
        """The salt of the key that is let in and whose SHA-256 begins with these 12 hexadecimal digits."""
        found = (digest for digest in self._digests if digest.hex()[:KEY_ID_LEN] == key_id)
        return next(map(self._salt, found), None)

    def _salt(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def entry_of(line: str, path: str) -> tuple[bytes, int]:
    """(digest, weight) of one line of the file. Raises ConfigError."""
    found = _WEIGHT.fullmatch(line)
    if found is None:
        return _digest(line, path), 1
    weight = int(found[2])
    if not 1 <= weight <= 1000:
        raise ConfigError(f"server.api_keys_file: {path} has a line with weight={weight}; it must be from 1 to 1000")
    return _digest(found[1], path), weight


def _digest(key: str, path: str) -> bytes:
    if not key.startswith(_HASHED):
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(_HASHED))
    except ValueError as error:
        raise ConfigError(f"server.api_keys_file: {path} has a malformed sha256: line") from error
    if len(digest) != hashlib.sha256().digest_size:
        raise ConfigError(f"server.api_keys_file: {path} has a sha256: line of {len(digest)} bytes; 32 are needed")
    return digest
