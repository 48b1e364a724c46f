"""A training run's folder: what is damaged there is named, what was cut short is made again, no disk is too small."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from specd.cli import main
from specd.errors import ConfigError
from specd.train.checkpoint import read_state
from specd.train.folder import without_place
from specd.train.mtp import MtpSettings, train
from specd.train.plan import Plan
from tests.training import changed, random_texts, tiny_shards


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> MtpSettings:
    """A run that was stopped after its second step."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model, shards = tiny_shards(folder, random_texts(40, vocab_size=97, longest=30))
    plan = Plan(folder / "run", epochs=1, batch_tokens=128, warmup=2, eval_every=2, eval_steps=1)
    settings = MtpSettings(model, (shards,), plan)
    train(changed(settings, stop_after=2))
    return settings


@pytest.fixture
def settings(begun: MtpSettings, tmp_path: Path) -> MtpSettings:
    return changed(begun, output=shutil.copytree(begun.plan.output, tmp_path / "run"))


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
    def damage(tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        old = tensors.pop(name)
        tensors |= {} if change is None else {name: change(old)}

    return damage


def value(name: str, new: Any) -> Any:
    def damage(tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        state[name] = new
        if new is None:
            del state[name]

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (tensor("weight.norm.weight", None), "weight.norm.weight is None, this run"),
        (tensor("second.norm.weight", None), "second.norm.weight is None"),
        (tensor("first.norm.weight", None), "first.norm.weight is None"),
        (tensor("weight.norm.weight", lambda old: old[:1]), "weight.norm.weight is .*1"),
        (
            tensor("weight.norm.weight", lambda old: old * torch.nan),
            "weight.norm.weight has values that are not finite",
        ),
        (value("step", None), "not a checkpoint .*step"),
        (value("step", "two"), "step is damaged"),
        (value("step", -1), "step is damaged"),
        (value("identity", None), "not a checkpoint .*identity"),
        (value("best_figures", []), "best_figures is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_named(settings: MtpSettings, damage: Any, message: str) -> None:
    path = settings.plan.output / "checkpoint.safetensors"
    tensors, state = load_file(path), read_state(path)
    damage(tensors, state)
    save_file(tensors, path, metadata={"state": orjson.dumps(state).decode()})
    with pytest.raises(ConfigError, match=f"{path}: .*{message}"):
        train(settings)


@pytest.mark.parametrize("text", ["5", "[1, 2]", "null"])
def test_a_state_that_is_none_is_named(settings: MtpSettings, text: str) -> None:
    path = settings.plan.output / "checkpoint.safetensors"
    save_file(load_file(path), path, metadata={"state": text})
    with pytest.raises(ConfigError, match="not a checkpoint of a training run"):
        train(settings)


def test_a_line_of_the_log_that_was_cut_short_is_made_again(settings: MtpSettings) -> None:
    log = settings.plan.output / "log.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"step":3,"lo')
    figures = train(settings)
    lines = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    assert lines[: whole.count(b"\n")] == [orjson.loads(line) for line in whole.splitlines()]
    assert figures in lines
    log.write_bytes(b"a note\n" + whole)
    with pytest.raises(ConfigError, match="not the log of a training run"):
        train(settings)


@pytest.mark.parametrize("role", [0, 2])
def test_text_in_which_nothing_is_learned_is_refused(tmp_path: Path, role: int) -> None:
    texts = random_texts(12, vocab_size=97)
    for text in texts:
        text.role[:] = role if text.held_out else 2 - role
    model, shards = tiny_shards(tmp_path, texts)
    with pytest.raises(ConfigError, match=f"no token that is learned is {'to train on' if role else 'held out'}"):
        train(MtpSettings(model, (shards,), Plan(tmp_path / "run")))


def test_shards_of_more_tokens_or_other_sizes_are_refused(begun: MtpSettings, tmp_path: Path) -> None:
    for name, wrong, message in (
        ("best", 97, "hold token 97; model has 97 tokens"),
        ("hidden", None, "hold states of 63 numbers, model has 64"),
    ):
        folder = shutil.copytree(begun.shards[0], tmp_path / name)
        for path in folder.iterdir():
            tensors, origin = load_file(path), orjson.dumps(None)
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                origin = orjson.loads(file.read(size))["__metadata__"]
            old = tensors[name]
            tensors[name] = old[:, 1:].contiguous() if wrong is None else torch.full_like(old, wrong)
            save_file(tensors, path, metadata=origin)
        with pytest.raises(ConfigError, match=message):
            train(changed(begun, shards=(folder,), output=tmp_path / "run"))


def test_a_disk_that_is_full_ends_the_run_with_one_line_and_loses_nothing(settings: MtpSettings) -> None:
    """A limit on the size of files stands for the disk."""
    words = ["train", "mtp", str(settings.model), "--shards", str(settings.shards[0]), "-o", str(settings.plan.output)]
    words += ["--epochs", "1", "--batch-tokens", "128", "--warmup", "2", "--eval-every", "2", "--eval-steps", "1"]
    path = settings.plan.output / "checkpoint.safetensors"
    before, limit = path.read_bytes(), 200_000
    script = "import sys\nfrom specd.cli import main\nsys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert len(before) > limit
    assert done.returncode == 1, done.stderr
    assert "checkpoint.partial: cannot be written" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert path.read_bytes() == before
    assert main(words) == 0
    assert read_state(path)["step"] > 2


def test_provenance_names_no_place(settings: MtpSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["specd", "train", "mtp", str(settings.model), f"--shards={settings.shards[0]}", "-o", "run"]
    monkeypatch.setattr(sys, "argv", ["/opt/somewhere/bin/specd", *words[1:]])
    train(changed(settings, init=settings.plan.output / "head", output=tmp_path / "second", stop_after=1))
    written = orjson.loads((tmp_path / "second" / "head" / "provenance.json").read_bytes())
    assert written["command"] == ["specd", "train", "mtp", "model", "--shards=shards", "-o", "run"]
    assert written["settings"]["init"] == "head"
    assert without_place("lr=0.5") == "lr=0.5"
    assert without_place("relative/path") == "relative/path"
