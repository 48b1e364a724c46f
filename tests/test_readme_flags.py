"""Settings and options that README.md names: each exists, and takes the value that is shown."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from specd.cli import build_parser
from specd.config import Config
from specd.config_loader import load_config, options
from specd.errors import ConfigError
from specd.request import SpeculationParams

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = "**Coming from another server.**"
SECTIONS = [section.name for section in dataclasses.fields(Config)]
REQUEST_FIELDS = {f"speculation.{field.name}" for field in dataclasses.fields(SpeculationParams)}  # of a request's body
SETTING = re.compile(rf"(?:--set )?((?:{'|'.join(SECTIONS)})\.(?!(?:jsonl?|png|py|toml)\b)[a-z_0-9]+)(?: ?= ?(\S+))?")


def code(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def settings(text: str) -> list[tuple[str, str]]:
    """(key, value or "") of the settings that a text names."""
    found = [SETTING.fullmatch(item) for item in code(text)]
    return [(match[1], match[2] or "") for match in found if match and match[1] not in REQUEST_FIELDS]


def serve_options() -> set[str]:
    parser = build_parser()
    (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name for action in commands.choices["serve"]._actions for name in action.option_strings}


def rows(text: str) -> list[list[str]]:
    """Of the table that follows `TABLE`, without its head; none where there is no such table."""
    lines = text.partition(TABLE)[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def check_settings(text: str) -> None:
    known = {option.key for option in options()}
    for key, value in settings(text):
        assert key in known, key
        if value:
            load_config(None, env={}, sets=[f"{key}={value}"])


def check_rows(table: list[list[str]]) -> None:
    known = serve_options()
    for row in table:
        assert len(row) == 4, row
        ours = row[-1]
        assert ours, row
        check_settings(ours)
        for option in re.findall(r"(?<![\w-])--[a-z-]+", " ".join(code(ours))):
            assert option in known, (option, row)
        if value := re.search(r"`--draft ([a-z+]+)(?::[A-Z]+)?`", ours):
            load_config(None, env={}, sets=[f"speculation.draft={value[1]}"])


def test_every_setting_that_the_readme_names_exists() -> None:
    assert len(settings(README)) > 20
    check_settings(README)


def test_what_other_servers_flags_are_here() -> None:
    table = rows(README)
    assert bool(table) == (TABLE in README), "the table follows its heading, after an empty line"
    check_rows(table)


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("`kv.pages`", AssertionError),
        ("`--set kv.memory=lots`", ConfigError),
        ("`log.level=loud`", ConfigError),
        ("`--max-model-len`", AssertionError),
        ("", AssertionError),
    ],
)
def test_a_name_that_is_wrong_is_found(cell: str, error: type[Exception]) -> None:
    head = f"{TABLE} What it is here:\n\n| vLLM | llama.cpp | SGLang | specd |\n|---|---|---|---|\n"
    table = rows(head + f"| `--x` | | | `--max-len`, `kv.memory=25%` |\n| `--y` | | | {cell} |\n\nMore.\n")
    assert len(table) == 2
    check_rows(table[:1])
    with pytest.raises(error):
        check_rows(table[1:])
