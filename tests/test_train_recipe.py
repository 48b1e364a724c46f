"""Recipes (`--config`) and the curves beside a run's log."""

from __future__ import annotations

import argparse
import builtins
from pathlib import Path
from typing import Any

import orjson
import pytest

from specd.cli import build_parser
from specd.train import plot
from specd.train.plot import draw, read_log, smoothed

RECIPE = """
[collect]
output = "shards"
join = 2048

[mtp]
shards = "shards"
output = "run"
draft-vocab = 16384
step_decay = 0.6
lr = 1e-3
loss = "ce"
without = ["input_norm", "output_norm"]

[draft]
shards = "shards"
output = "draft"
layers = 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["train", *words])


def test_each_verb_reads_its_own_table(recipe: Path) -> None:
    mtp = parsed("mtp", "target", "--config", str(recipe))
    assert (mtp.model, mtp.shards, mtp.output) == ("target", [Path("shards")], Path("run"))
    assert (mtp.draft_vocab, mtp.step_decay, mtp.lr, mtp.loss) == (16384, 0.6, 1e-3, "ce")
    assert mtp.without == ["input_norm", "output_norm"]
    assert mtp.epochs == 6  # what the recipe leaves out
    collect = parsed("collect", "target", f"--config={recipe}")
    assert (collect.output, collect.join) == (Path("shards"), 2048)
    assert parsed("draft", "target", "--config", str(recipe)).layers == 1


def test_the_command_line_wins(recipe: Path) -> None:
    for words in (["--lr", "0.1", "--config", str(recipe)], ["--config", str(recipe), "--lr=0.1"]):
        args = parsed("mtp", "target", *words, "--without", "hidden_norm", "-o", "other")
        assert (args.lr, args.without, args.output) == (0.1, ["hidden_norm"], Path("other"))
        assert args.draft_vocab == 16384


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("learning_rate = 1", "[mtp] learning_rate: no such option; it has accumulate, batch-tokens"),
        ('model = "x"', "[mtp] model: no such option"),
        ('config = "x"', "[mtp] config: no such option"),
        ('lr = "fast"', "argument --lr: invalid float value: 'fast'"),
        ("lr = [1]", "[mtp] lr: [1] is a list"),
        ('without = "input_norm"', "[mtp] without: 'input_norm' is not a list"),
        ('without = ["input"]', "argument --without: invalid choice: 'input'"),
        ("epochs = true", "--epochs: true where a value is needed"),
        ("steps = 1.5", "argument --steps: invalid int value: '1.5'"),
        ("steps = -1\n[mtp]", "not a recipe"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, message: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'[mtp]\nshards = "a"\noutput = "b"\n{table}\n')
    with pytest.raises(SystemExit) as stopped:
        parsed("mtp", "target", "--config", str(path))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_or_says_nothing(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, message in (
        (recipe.parent / "none.toml", "none.toml: not a recipe"),
        (recipe, "has no table [converse]"),
    ):
        with pytest.raises(SystemExit):
            parsed("converse", "target", "--config", str(path))
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsed("mtp", "target", "--config")
    assert "argument --config: expected one argument" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # options that the recipe does not have are asked for as ever
        parsed("draft", "target", "--layers", "1")
    assert "required: --shards, -o/--output" in capsys.readouterr().err


def write_log(folder: Path, looks: int = 2) -> None:
    lines: list[dict[str, Any]] = []
    for step in range(0, 10 * looks, 10):
        figures = {name: [0.5, 0.4] for name in ("loss", "top1", "overlap")}
        lines += [{"step": step, "held_out": figures, "kept": 0.7}]
        lines += [{"step": step + 1 + i, "loss": 3.0 - 0.1 * step, "lr": 1e-3} for i in range(10)]
    (folder / "log.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def test_curves_are_drawn_beside_the_log(tmp_path: Path) -> None:
    write_log(tmp_path)
    assert draw(tmp_path)
    first = (tmp_path / "log.png").read_bytes()
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    write_log(tmp_path, looks=5)
    assert draw(tmp_path)
    assert (tmp_path / "log.png").read_bytes() != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "log.png"]
    steps, looks = read_log(tmp_path / "log.jsonl")
    assert (len(steps), [look["step"] for look in looks]) == (50, [0, 10, 20, 30, 40])


def test_smoothing_starts_at_the_first_value() -> None:
    assert smoothed([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert smoothed([0.0, 1.0])[1] == pytest.approx(1 / 1.98)


def test_without_matplotlib_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path)
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    plot._say_once.cache_clear()
    assert not draw(tmp_path)
    assert not draw(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "No module named 'matplotlib.figure'; specd's extra 'train'" in lines[0]
    assert not (tmp_path / "log.png").exists()
