"""Several real processes train as one does; one that fails takes the others with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file

from specd.errors import ConfigError
from specd.train.mtp import MtpSettings, train
from specd.train.parallel import Ranks, check_share, world
from specd.train.plan import Plan, values_of
from tests.training import changed, random_texts, run_ranks, tiny_shards

_STEPS = 12
# Two ranks never have as many of them as the other: an epoch of the tiny corpus ends with a step of fewer.
_OPTIONS = {
    "draft-vocab": 60, "steps": 2, "epochs": 4, "batch-tokens": 256, "accumulate": 3, "warmup": 4, "lr": 2e-3,
    "noise": 0.1, "feature-weight": 0.1, "eval-every": 5, "stop-after": _STEPS, "rank-timeout": 60,
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    texts = random_texts(160, vocab_size=97, longest=40)
    return tiny_shards(tmp_path_factory.mktemp("parallel"), texts, shard_tokens=1024)


@pytest.fixture(scope="module")
def alone(places: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> MtpSettings:
    """A finished run of one process."""
    output = tmp_path_factory.mktemp("alone")
    values: dict[str, Any] = {name.replace("-", "_"): value for name, value in _OPTIONS.items()}
    settings = MtpSettings(
        places[0], (places[1],), Plan(output, **values_of(Plan, values)), **values_of(MtpSettings, values)
    )
    train(settings)
    return settings


def words(settings: MtpSettings, output: Path, **changed: object) -> list[str]:
    options = _OPTIONS | {name.replace("_", "-"): value for name, value in changed.items()}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["train", "mtp", str(settings.model), "--shards", str(settings.shards[0]), "-o", str(output), *flags]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (folder / "log.jsonl").read_bytes().splitlines()]


def largest_difference(folder: Path, other: Path) -> float:
    """Of weights and moments, relative to the largest value of each tensor."""
    one, two = (load_file(path / "checkpoint.safetensors") for path in (folder, other))
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max() / one[name].abs().max()) for name in one)


def assert_the_same_run(alone: Path, together: Path) -> None:
    difference = largest_difference(alone, together)
    assert difference < 2e-5, difference
    for one, two in zip(lines(alone), lines(together), strict=True):
        assert one["step"] == two["step"]
        if "loss" in one:
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=2e-5)
        else:
            assert two["held_out"]["top1"] == pytest.approx(one["held_out"]["top1"], abs=1e-3)
            assert two["held_out"]["overlap"] == pytest.approx(one["held_out"]["overlap"], abs=1e-4)


def test_two_ranks_under_torchrun_are_one_process(alone: MtpSettings, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "specd"]
    done = subprocess.run([*launcher, *words(alone, tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("drafts kept of") == 1  # one of them speaks
    assert done.stderr.count("held-out top-1") == 4
    assert_the_same_run(alone.plan.output, tmp_path)
    assert (tmp_path / "head" / "model.safetensors").exists()


def test_a_run_goes_on_with_another_way_to_share(alone: MtpSettings, tmp_path: Path) -> None:
    """Slices of the head on two ranks, then the whole head in one process."""
    for code, error in run_ranks([words(alone, tmp_path, shard="fsdp", stop_after=10)] * 2):
        assert code == 0, error
    train(changed(alone, output=tmp_path))
    assert_the_same_run(alone.plan.output, tmp_path)


def test_the_comparison_can_fail(alone: MtpSettings, tmp_path: Path) -> None:
    train(changed(alone, output=tmp_path, seed=1))
    assert largest_difference(alone.plan.output, tmp_path) > 1e-2


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_a_rank_that_fails_ends_the_other(alone: MtpSettings, tmp_path: Path, shard: str) -> None:
    """Whoever lost it says so; the one that failed says why, and not that it lost somebody."""
    patch = (
        "import specd.train.mtp as mtp\nreal = mtp.run_passes\n"
        "def broken(*a, **k):\n"
        "    broken.calls = getattr(broken, 'calls', 0) + 1\n"
        "    if rank == 1 and broken.calls == 20: raise RuntimeError('no memory left')\n"
        "    return real(*a, **k)\n"
        "mtp.run_passes = broken\n"
    )
    (first, said), (second, cause) = run_ranks([words(alone, tmp_path, shard=shard)] * 2, patch=patch)
    assert (first, second) == (1, 1)
    assert "specd: rank 0 of 2 failed, or lost another rank: " in said
    assert "RuntimeError: no memory left" in cause
    assert "lost another rank" not in cause
    assert lines(tmp_path)[-1]["step"] >= 1


def test_a_rank_that_hangs_ends_the_other(alone: MtpSettings, tmp_path: Path) -> None:
    """The limit holds from the step on in which it matters: however long the ranks take to start."""
    patch = (
        "import datetime, time\nimport torch.distributed as dist\nimport specd.train.trainer as trainer\n"
        "join, step = dist.init_process_group, trainer.Trainer._train_step\n"
        "def patient(backend, timeout):\n"
        "    patient.limit = timeout\n"
        "    join(backend, timeout=datetime.timedelta(seconds=100))\n"
        "def hanging(self, groups):\n"
        "    if self.step == 2:\n"
        "        if rank == 0: time.sleep(1000)\n"
        "        dist.distributed_c10d._set_pg_timeout(patient.limit)\n"
        "    return step(self, groups)\n"
        "dist.init_process_group, trainer.Trainer._train_step = patient, hanging\n"
    )
    _, (code, said) = run_ranks([words(alone, tmp_path, rank_timeout=3)] * 2, patch=patch, hangs=0)
    assert code == 1
    assert "specd: rank 1 of 2 failed, or lost another rank: " in said
    assert "imed out" in said


def test_ranks_that_were_started_differently_are_refused(alone: MtpSettings, tmp_path: Path) -> None:
    pair = run_ranks([words(alone, tmp_path), words(alone, tmp_path, lr=1e-3)])
    for code, error in pair:
        assert code == 78
        assert "rank 1 has lr 0.001, rank 0 0.002: they must agree" in error


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2 without MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK=2: must be below"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two': not a whole number"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], message: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        world()


def test_what_cannot_be_shared_is_refused(alone: MtpSettings) -> None:
    with pytest.raises(ConfigError, match="--accumulate 3: 4 ranks share the forwards of a step; give at least 4"):
        check_share(Ranks(3, 4), accumulate=3, shard="ddp")
    with pytest.raises(ConfigError, match="--shard fsdp: one process has nothing to share"):
        train(changed(alone, shard="fsdp"))


def test_one_process_is_a_run_of_one_rank() -> None:
    assert world() == (0, 1)
    assert not torch.distributed.is_initialized()
