"""API keys. A route is closed unless it is one of the open ones: nothing depends on how a path is spelled."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

from specd.errors import ConfigError, RequestError

_HASHED = "sha256:"


class ApiKeys:
    """SHA-256 digests of the keys that are let in; no keys = everybody is."""

    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._digests = tuple(digests)
        self._secret = secrets.token_bytes(32)

    @classmethod
    def from_file(cls, path: str) -> ApiKeys:
        """One key a line, or `sha256:HEX` of one; blank lines and lines that begin with # are skipped.

        Raises ConfigError when it cannot be read or holds no key: an empty file must not open the server.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"server.api_keys_file: cannot read {path}: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise ConfigError(f"server.api_keys_file: {path} has no key; write one a line or leave it empty")
        return cls(_digest(key, path) for key in keys)

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
        return hmac.digest(self._secret, digest, "sha256")


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
