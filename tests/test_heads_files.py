"""A head's folder: what is written is read again, and what is damaged is refused by name."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from specd.errors import ModelError
from specd.models.heads import read_head, write_head
from tests.heads import (
    AWKWARD,
    DRAFT_IDS,
    NORMS,
    VOCABULARY,
    head_config,
    head_file,
)
from tests.tiny import LLAMA3_ROPE


@pytest.mark.parametrize("overrides", [{}, AWKWARD, dict.fromkeys(NORMS, False)], ids=["plain", "awkward", "eagle"])
def test_a_head_survives_its_file(overrides: dict[str, Any], tmp_path: Path) -> None:
    rope = dataclasses.replace(LLAMA3_ROPE, freq_factors=(1.0,) * 7 + (8.0,))
    file = head_file(head_config(rope=rope, **overrides))
    target = {"name": "tiny", "hidden_size": 40, "vocab_size": VOCABULARY, "num_layers": 3}
    write_head(tmp_path / "h", file.config, file.weights, token_ids=file.token_ids, target=target)
    found = read_head(tmp_path / "h")
    assert (found.config, found.target) == (file.config, target)
    assert found.weights.keys() == file.weights.keys()
    for name, tensor in file.weights.items():
        assert torch.equal(found.weights[name], tensor.bfloat16()), name
    if file.token_ids is None:
        assert found.token_ids is None
    else:
        assert found.token_ids is not None
        assert torch.equal(found.token_ids, file.token_ids)


def test_its_files_have_the_mode_of_any_new_file(tmp_path: Path) -> None:
    file = head_file(head_config())
    for umask in (0o022, 0o077):
        before = os.umask(umask)
        try:
            write_head(tmp_path / f"{umask}", file.config, file.weights, token_ids=None, target={})
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / f"{umask}").iterdir()}
        assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o666 & ~umask)


def damage(folder: Path, name: str, value: Any) -> None:
    """One value of config.json, or one tensor, is another, or gone."""
    if name in (tensors := load_file(folder / "model.safetensors")) or isinstance(value, torch.Tensor):
        kept = {k: t for k, t in tensors.items() if k != name} | ({} if value is None else {name: value})
        save_file(kept, folder / "model.safetensors")
        return
    data = orjson.loads((folder / "config.json").read_bytes()) | {name: value}
    (folder / "config.json").write_bytes(orjson.dumps({k: v for k, v in data.items() if v is not None}))


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("specd_head", 2, "specd_head"),
        ("head_dim", None, "no head_dim"),
        ("colour", "red", "no colour"),
        ("concat", "sideways", "concat is 'sideways'"),
        ("num_heads", 0, "num_heads is 0"),
        ("num_heads", True, "num_heads is True"),
        ("rms_norm_eps", "small", "rms_norm_eps is 'small'"),
        ("output_norm", 1, "output_norm is 1"),
        ("rope", 5, "rope is 5"),
        ("rope", {"theta": "x"}, "rope is .*'x'"),
        ("rope", {"kind": "yarn"}, "rope kind 'yarn'"),
        ("rope", {"freq_factors": [1.0]}, "1 rope factors"),
        ("output_norm", False, "norm.weight"),
        ("enorm.weight", None, r"enorm.weight is None"),
        ("eh_proj.weight", torch.zeros(40, 40), r"eh_proj.weight is \(40, 40\)"),
        ("extra.weight", torch.zeros(4), "extra.weight"),
        ("d2t", None, "d2t"),
        ("d2t", torch.full((19,), 90), "ascending ids below 97"),
        ("d2t", -torch.arange(19), "ascending ids"),
        ("d2t", torch.arange(20), "19 ascending ids"),
        ("d2t", torch.zeros(19, 1, dtype=torch.int64), r"d2t is \[19, 1\]"),
        ("d2t", torch.tensor(3), r"d2t is \[\]"),
        ("d2t", torch.full((19,), 0.5), "d2t is .* of torch.float32"),
        ("num_kv_heads", 3, "4 query heads cannot share 3 key/value heads"),
        ("head_dim", 15, "head_dim is 15"),
        ("head_dim", 10**10, "head_dim is 10000000000"),  # frequencies of that many would fill the memory
        ("target", [2], r"target is \[2\]"),
        ("norm.weight", torch.ones(40, dtype=torch.int8), "norm.weight is of torch.int8"),
        ("norm.weight", torch.ones(40).to(torch.float8_e4m3fn), "norm.weight is of torch.float8_e4m3fn"),
        ("norm.weight", torch.full((40,), float("nan")), "norm.weight has values that are not finite"),
    ],
)
def test_damaged_files_are_refused_by_name(name: str, value: Any, named: str, tmp_path: Path) -> None:
    file = head_file(head_config(draft_vocab_size=len(DRAFT_IDS)))
    write_head(tmp_path, file.config, file.weights, token_ids=file.token_ids, target={})
    damage(tmp_path, name, value)
    with pytest.raises(ModelError, match=named):
        read_head(tmp_path)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a head's folder"):
        read_head(tmp_path)


def test_a_head_that_is_read_no_longer_needs_its_file(tmp_path: Path) -> None:
    """Mapped weights would follow the file, and one that is cut short would end the process."""
    file = head_file(head_config())
    write_head(tmp_path, file.config, file.weights, token_ids=None, target={})
    found, path = read_head(tmp_path).weights, tmp_path / "model.safetensors"
    with path.open("r+b") as opened:
        opened.write(bytes(path.stat().st_size))
    for name, tensor in file.weights.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
