"""How a setting is declared (`option`), and the checks of those whose range is no pair of numbers."""

from __future__ import annotations

import dataclasses
import re
import reprlib
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specd.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DRAFT = re.compile(r"auto|none|ngram|mtp\+ngram|(mtp|lm)(:.+)?|layers:[1-9][0-9]{0,8}", re.DOTALL)
_MOST_BYTES = 1 << 62
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|%|)")


def option(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    reloadable: bool = False,
    flag: str = "",
    check: Callable[[Any], object] | None = None,
) -> Any:
    """A dataclass field with its metadata. low and high are inclusive; check raises ConfigError on a bad value."""
    metadata = {
        "default": default,
        "doc": doc,
        "unit": unit,
        "range": (low, high),
        "reloadable": reloadable,
        "flag": flag,
        "check": check,
    }
    return dataclasses.field(default=default, metadata=metadata)


def memory_bytes(value: int | str, *, ram_bytes: int) -> int | None:
    """`kv.memory` in bytes: an int is bytes, "4GiB" and "500MB" are sizes, "25%" is a share of ram_bytes.

    "auto" gives None: what `max_running` sequences of `max_len` need, at most a quarter of RAM. Raises ConfigError.
    """
    if value == "auto":
        return None
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ConfigError(f'{value!r} is not a size; write "auto", bytes, "4GiB" or "25%"')
    number, unit = float(match[1]), match[2]
    if unit == "%" and not 0 < number <= 90:
        raise ConfigError(f"{value!r} is not a usable share of RAM; allowed are more than 0% and at most 90%")
    wanted = ram_bytes * number / 100 if unit == "%" else number * _UNITS[unit]
    if wanted > _MOST_BYTES:
        raise ConfigError(f"{reprlib.repr(value)} is more memory than any machine has")
    size = int(wanted)
    if size <= 0:
        raise ConfigError(f"{value!r} is no memory at all; it must be more than 0")
    return size


def check_memory(value: int | str) -> None:
    memory_bytes(value, ram_bytes=1 << 40)


def check_draft(value: str) -> None:
    """The spelling alone; `drafters.registry.parse_draft` reads what this lets pass."""
    if value == "mtp:builtin":
        raise ConfigError("heads inside a model's checkpoint ('mtp:builtin') are not read yet")
    if _DRAFT.fullmatch(value) is None:
        known = "auto, none, ngram, layers:N, mtp, mtp+ngram, mtp:FOLDER, lm or lm:MODEL"
        raise ConfigError(f"{value!r} is no drafter; give {known}")


def check_draft_len(value: int | str) -> None:
    if isinstance(value, str) and value != "adaptive":
        raise ConfigError(f'{value!r} is not "adaptive" and not a whole number')


def check_host(value: str) -> None:
    if not value.strip():
        raise ConfigError("an empty address; give 127.0.0.1, or 0.0.0.0 for every address of this machine")


def check_path(value: str) -> None:
    if not value:
        raise ConfigError("an empty name; give an alias, a folder, a .gguf file or a hub id")
    check_home(value)


def check_home(value: str) -> None:
    """~/x and ~user/x are read as a shell reads them."""
    try:
        Path(value).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{value!r}: nobody of that name has a home folder here") from error


def check_names(value: tuple[str, ...]) -> None:
    for name in value:
        if not name.strip():
            raise ConfigError("holds an empty name")


def check_host_names(value: tuple[str, ...]) -> None:
    for name in value:
        if re.fullmatch(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", name) is None:
            raise ConfigError(f"{name!r} is not a host's name; write it without scheme, port or path")


def check_origins(value: tuple[str, ...]) -> None:
    for origin in value:
        if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) is None:
            raise ConfigError(f"{origin!r} is not an origin; write scheme://host[:port] without a path, or *")


def check_journal(value: str) -> None:
    if value not in ("auto", "off") and "/" not in value:
        raise ConfigError(f'{value!r} is not "auto", not "off", and not a path: one has at least one "/"')
    check_home(value)


def check_endpoint(value: str) -> None:
    try:
        parts = urllib.parse.urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        usable = False
    if not usable:
        raise ConfigError(f"{value!r} is not an address; write http://host:port/path or https://...")


def check_service_name(value: str) -> None:
    if not value.strip():
        raise ConfigError("an empty name; give what collectors are to call this server")
