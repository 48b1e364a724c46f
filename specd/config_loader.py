"""Fills `Config` from a file, the environment and the command line; every error names the place and the key.

Order, later wins: defaults < file < SPECD_SECTION__KEY < --set section.key=value < other command line options.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import stat
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from specd.config import Config
from specd.errors import ConfigError

_PREFIX = "SPECD_"
# What Kubernetes sets for a service whose name begins like a section: SPECD_SERVER_SERVICE_HOST for `specd-server`.
_SERVICE_NAME = re.compile(r"SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?")
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")
_MOST_EXACT = 1 << 53  # whole numbers up to here are floats, too


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One setting as the loader sees it."""

    section: str
    field: dataclasses.Field[Any]
    type: Any  # resolved annotation

    @property
    def key(self) -> str:
        return f"{self.section}.{self.field.name}"

    @property
    def choices(self) -> tuple[str, ...]:
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Allowed Python types, None left out: an optional setting is unset by not naming it."""
        if self.choices:
            return (str,)
        if isinstance(self.type, types.UnionType):
            return tuple(kind for kind in typing.get_args(self.type) if kind is not type(None))
        return (self.type,)

    def describe(self) -> str:
        """What is allowed, in words."""
        if self.choices:
            return "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
        low, high = self.field.metadata["range"]
        bounds = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
        unit = f" ({self.field.metadata['unit']})" if self.field.metadata["unit"] else ""
        words = [_KIND_NAMES[kind] + (bounds + unit if kind in (int, float) else "") for kind in self.kinds]
        return " or ".join(words)


_KIND_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple[str, ...]: 'a list of strings (["a", "b"])',
}


def options() -> Iterator[Option]:
    """Every setting, in the order of the sections."""
    sections = typing.get_type_hints(Config)
    for section in dataclasses.fields(Config):
        hints = typing.get_type_hints(sections[section.name])
        for field in dataclasses.fields(sections[section.name]):
            yield Option(section.name, field, hints[field.name])


_OPTIONS = {option.key: option for option in options()}


def load_config(
    file: Path | None,
    *,
    env: Mapping[str, str],
    sets: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
) -> Config:
    """The effective configuration. flags: dotted key -> value, None = not given. Raises ConfigError."""
    values: dict[str, Any] = {}
    for source, key, value in (
        *(_read_file(file) if file else ()),
        *_read_env(env),
        *_read_sets(sets),
        *_read_flags(flags or {}),
    ):
        option = _find(key, source)
        values[key] = check(option, value, source)
    sections: dict[str, Any] = {
        name: _section_type(name)(
            **{option.field.name: values[option.key] for option in _section_options(name) if option.key in values}
        )
        for name in _sections()
    }
    config = Config(**sections)
    check_together(config)
    return config


def check(option: Option, value: object, source: str) -> Any:
    """The value in the setting's own type (an int where a float is asked for becomes one). Raises ConfigError."""
    meta = option.field.metadata
    kinds = option.kinds
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = tuple(value)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        value = float(value) if abs(value) <= _MOST_EXACT else value
    if not any(_is_a(value, kind) for kind in kinds) or (option.choices and value not in option.choices):
        hint = '; quote it to make it a string: "..."' if str in kinds and not option.choices else ""
        raise ConfigError(f"{source}: {option.key} = {_show(value)}: must be {option.describe()}{hint}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = meta["range"]
        beyond = (low is not None and value < low) or (high is not None and value > high)
        if beyond or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{source}: {option.key} = {_show(value)}: must be {option.describe()}")
    if "\0" in (value if isinstance(value, str) else "".join(value) if isinstance(value, tuple) else ""):
        raise ConfigError(f"{source}: {option.key} = {_show(value)}: must not hold a zero character")
    if meta["check"] is not None:
        try:
            meta["check"](value)
        except ConfigError as error:
            raise ConfigError(f"{source}: {option.key}: {error}") from None
    return value


def check_together(config: Config) -> None:
    """Settings that only make sense together. Raises ConfigError naming all of them."""
    spec = config.speculation
    if spec.ngram_min > spec.ngram_max:
        raise ConfigError(
            f"speculation.ngram_min = {spec.ngram_min} is above speculation.ngram_max = {spec.ngram_max}; "
            "the shortest match cannot be longer than the longest"
        )
    if isinstance(spec.draft_len, int) and spec.draft_len > spec.max_draft:
        raise ConfigError(
            f"speculation.draft_len = {spec.draft_len} is above speculation.max_draft = {spec.max_draft}; "
            "raise max_draft or lower draft_len"
        )
    model = config.model
    if model.quantize != "none" and model.kernels == "torch":
        raise ConfigError(
            f'model.quantize = "{model.quantize}" is done by the native kernels; model.kernels = "torch" rules them out'
        )
    if model.dtype == "bfloat16" and (model.kernels == "native" or model.quantize != "none"):
        key = "model.quantize" if model.quantize != "none" else "model.kernels"
        value = model.quantize if model.quantize != "none" else model.kernels
        raise ConfigError(
            f'model.dtype = "bfloat16" with {key} = "{value}": the native kernels compute in float32; leave one out'
        )
    if config.scheduler.max_tokens < config.scheduler.max_running:
        raise ConfigError(
            f"scheduler.max_tokens = {config.scheduler.max_tokens} is below scheduler.max_running = "
            f"{config.scheduler.max_running}; a step must hold one token of each running sequence"
        )
    if isinstance(spec.draft_len, int) and spec.draft != "none":
        needed = config.scheduler.max_running * (1 + spec.draft_len)
        if needed > config.scheduler.max_tokens:
            raise ConfigError(
                f"speculation.draft_len = {spec.draft_len} with scheduler.max_running = {config.scheduler.max_running} "
                f"needs {needed} tokens a step, and scheduler.max_tokens = {config.scheduler.max_tokens}: a fixed "
                "length is never cut; raise max_tokens or lower one of the others"
            )


def check_rereadable(file: Path, name: str = "") -> None:
    """For a file that is read while others are served. Raises ConfigError for a pipe, whose reader may wait for ever.

    One that is not there is no error here. name: of the setting that names the file.
    """
    try:
        regular = stat.S_ISREG(file.stat().st_mode)
    except OSError:
        return
    if not regular:
        raise ConfigError(f"{name and name + ': '}{file} is not a regular file, so it cannot be read again")


def parse_value(text: str) -> Any:
    """TOML if the text is one TOML value, else the text itself (`--set model.path=my/model` needs no quotes)."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # as for a file
        return text
    return parsed["value"] if set(parsed) == {"value"} else text  # more keys: the text held a line break


def reference_toml() -> str:
    """`config/specd.toml`: every setting at its default, with unit, range, doc and reloadable mark."""
    lines = ["# Every setting of specd, at its default. Order: defaults < this file < SPECD_SECTION__KEY < --set."]
    lines += ["# [reload] marks what a running daemon could take without loading the model again.", ""]
    section = ""
    for option in _OPTIONS.values():
        if option.section != section:
            section = option.section
            doc = (_section_type(section).__doc__ or "").strip()
            lines += [f"[{section}]  # {doc}"]
        meta = option.field.metadata
        mark = " [reload]" if meta["reloadable"] else ""
        lines += textwrap.wrap(meta["doc"], 118, initial_indent="# ", subsequent_indent="# ")
        lines += [f"# {option.describe()[0].upper()}{option.describe()[1:]}.{mark}"]
        default = meta["default"]
        lines += [f"# {option.field.name} =" if default is None else f"{option.field.name} = {_toml(default)}", ""]
    return "\n".join(lines)


def _read_file(file: Path) -> Iterator[tuple[str, str, Any]]:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text: byte {error.start}") from error
    except (ValueError, RecursionError) as error:  # tomllib: also for a number of thousands of digits, or deep nesting
        raise ConfigError(f"{file}: is not TOML: {error}") from error
    for section, table in tables.items():
        if section in _sections() and not isinstance(table, dict):
            raise ConfigError(f"{file}: {section} = {_show(table)}: is a section; write [{section}] and keys below it")
        if section not in _sections() or not table:
            _find_section(section, str(file))
            continue
        for key, value in table.items():
            yield str(file), f"{section}.{key}", value


def _read_env(env: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """Names without a double underscore are not ours (Kubernetes makes SPECD_PORT for a service named specd).

    Those that begin like one of ours are refused: a single underscore is a slip that would change nothing, silently.
    """
    for name in sorted(env):
        if not name.startswith(_PREFIX):
            continue
        section, separator, key = name.removeprefix(_PREFIX).partition("__")
        if separator:
            yield name, f"{section.lower()}.{key.lower()}", parse_value(env[name])
        else:
            _refuse_single_underscore(name, env[name])


def _refuse_single_underscore(name: str, value: str) -> None:
    """Raises ConfigError with the right spelling for SPECD_SERVER_PORT and its like."""
    section, separator, key = name.removeprefix(_PREFIX).partition("_")
    if not separator or section.lower() not in _sections():
        return
    if not _SERVICE_NAME.fullmatch(key) and not _SERVICE_VALUE.match(value):
        raise ConfigError(f"{name}: section and key are parted by two underscores: {_PREFIX}{section}__{key}")


def _read_sets(sets: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    for item in sets:
        key, separator, text = item.partition("=")
        if not separator or "." not in key:
            raise ConfigError(f"--set {item!r}: write --set section.key=value")
        yield "--set", key.strip(), parse_value(text.strip())


def _read_flags(flags: Mapping[str, object]) -> Iterator[tuple[str, str, Any]]:
    for key, value in flags.items():
        if value is not None:
            flag = _OPTIONS[key].field.metadata["flag"] if key in _OPTIONS else ""
            yield flag or "command line", key, value


def _find(key: str, source: str) -> Option:
    option = _OPTIONS.get(key)
    if option is not None:
        return option
    section, _, name = key.partition(".")
    _find_section(section, source)
    names = [option.field.name for option in _section_options(section)]
    raise ConfigError(f"{source}: unknown key {key}{_nearest(name, names, section + '.')}")


def _find_section(section: str, source: str) -> None:
    if section not in _sections():
        raise ConfigError(f"{source}: unknown section {section}{_nearest(section, _sections(), '')}")


def _nearest(name: str, names: Sequence[str], prefix: str) -> str:
    """A hint: the same name in another section, a similar one in this section, or all there are."""
    elsewhere = [option.key for option in _OPTIONS.values() if option.field.name == name]
    close = [prefix + match for match in difflib.get_close_matches(name, names, n=1, cutoff=0.5)]
    hints = elsewhere or close
    return f"; did you mean {hints[0]}?" if hints else f"; there are {', '.join(names)}"


def _sections() -> list[str]:
    return [section.name for section in dataclasses.fields(Config)]


def _section_type(section: str) -> Any:
    return typing.get_type_hints(Config)[section]


def _section_options(section: str) -> list[Option]:
    return [option for option in _OPTIONS.values() if option.section == section]


def _is_a(value: object, kind: Any) -> bool:
    if kind == tuple[str, ...]:
        return isinstance(value, tuple)
    return type(value) is kind  # a bool is not an int


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
