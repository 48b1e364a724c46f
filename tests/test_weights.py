"""safetensors: what is read back, and every lie a header can tell."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from specd.attention.torch_attention import TorchAttention
from specd.errors import ModelError
from specd.models.registry import KernelChoice, load_target
from specd.models.weights import SafetensorsFolder, check_weights, read_header
from tests.tiny import CPU, tiny_config, tiny_weights, write_hf_folder


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_folder_reads_back_what_was_saved(num_shards: int, tmp_path: Path) -> None:
    weights = tiny_weights(tiny_config())
    folder = SafetensorsFolder(write_hf_folder(tmp_path, config=tiny_config(), num_shards=num_shards))
    assert folder.shapes == tiny_config().weight_shapes()
    assert set(folder) == set(weights)
    assert all(torch.equal(folder[name], tensor) for name, tensor in weights.items())


def test_every_dtype_and_unaligned_data(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
    saved = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    save_file(saved, tmp_path / "only.safetensors")
    folder = SafetensorsFolder(tmp_path)
    assert all(torch.equal(folder[name], tensor) for name, tensor in saved.items())
    odd = tmp_path / "odd"
    odd.mkdir()
    header = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9), "e": entry("F32", [0, 4], 9, 9)}
    write(odd / "model.safetensors", header, b"\x07" + torch.tensor([1.5, -2.0]).numpy().tobytes())
    read = SafetensorsFolder(odd)
    assert read["b"].tolist() == [1.5, -2.0]
    assert read["e"].shape == (0, 4)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry("F32", [2], 0, 4)}, "8 bytes, its span is 4"),
        ({"a": entry("F32", [-1], 0, 4)}, "shape"),
        ({"a": entry("F32", [1.0], 0, 4)}, "shape"),
        ({"a": entry("F32", [True], 0, 4)}, "shape"),
        ({"a": entry("F32", [4], 8, 24)}, "the file has"),
        ({"a": entry("F32", [1 << 62, 1 << 62], 0, 16)}, "its span is 16"),
        ({"a": entry("F32", [2], 8, 0)}, "its span is -8"),
        ({"a": entry("F32", [1], -4, 0)}, "data_offsets"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, "data_offsets"),
        ({"a": entry("F4", [1], 0, 4)}, "F4"),
        ({"a": entry(["F32"], [1], 0, 4)}, "dtype"),
        ({"a": {"dtype": "F32"}}, "no dtype, shape"),
        ({"a": 3}, "no dtype, shape"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, "'a' and 'b' overlap"),
        ([], "not a JSON object"),
        (b"{", "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b'{"\xff": 1}', "not JSON"),
    ],
)
def test_headers_that_lie(header: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_header(write(tmp_path / "model.safetensors", header, bytes(16)))


@pytest.mark.parametrize("length", [3, 100_000_001, (1 << 64) - 1])
def test_header_lengths_that_lie(length: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"header"):
        read_header(write(tmp_path / "m.safetensors", b"{}", length=length))


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            read_header(path)


def test_damaged_headers_never_raise_anything_else(tmp_path: Path) -> None:
    path, generator = tmp_path / "model.safetensors", random.Random(5)
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, path)
    whole = path.read_bytes()
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(whole) - 28)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            spans = read_header(path)
        except ModelError:
            refused += 1
        else:
            assert all(span.begin <= span.end <= len(whole) for span in spans.values())
    assert refused > 200


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/out.safetensors", "a/b.safetensors", "x.bin", "..", 5])
def test_an_index_cannot_leave_its_folder(name: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "out.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match=r"is not a \.safetensors file of this folder"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "incomplete"),
        ({"weight_map": {"a": "m.safetensors", "z": "m.safetensors"}}, "no file holds: z"),
        ({"weight_map": {"z": "m.safetensors"}}, "'a'"),
        ({"weight_map": {}}, "empty"),
        ({"weight_map": 3}, "weight_map"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_an_index_that_does_not_fit(index: Any, message: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "m.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_pickled_checkpoints_are_named_and_not_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match=rf"{name} is a pickled checkpoint.*safetensors"):
        SafetensorsFolder(tmp_path)


def test_folders_without_a_clear_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        SafetensorsFolder(tmp_path)
    for name in ("a", "b"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"2 \.safetensors files"):
        SafetensorsFolder(tmp_path)


def test_tensors_that_do_not_match_the_config_are_named() -> None:
    config = tiny_config(num_layers=1)
    expected = config.weight_shapes()
    found = dict(expected)
    del found["model.norm.weight"]
    found["model.extra.weight"] = (1,)
    found["model.layers.0.mlp.down_proj.weight"] = (96, 64)
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = (8,)
    with pytest.raises(ModelError) as caught:
        check_weights(Path("m"), found, expected, tied=False)
    text = str(caught.value)
    assert "missing: model.norm.weight" in text
    assert "unexpected: model.extra.weight" in text
    assert "model.layers.0.mlp.down_proj.weight is [96, 64], not [64, 96]" in text
    assert "inv_freq" not in text


def test_vocabulary_rows_may_be_padded_but_not_missing() -> None:
    expected = tiny_config().weight_shapes()
    check_weights(Path("m"), expected | {"lm_head.weight": (104, 64)}, expected, tied=False)
    with pytest.raises(ModelError, match="lm_head"):
        check_weights(Path("m"), expected | {"lm_head.weight": (96, 64)}, expected, tied=False)
    tied = tiny_config(tied=True).weight_shapes()
    check_weights(Path("m"), tied | {"lm_head.weight": (97, 64)}, tied, tied=True)


def test_long_lists_are_cut() -> None:
    expected = tiny_config().weight_shapes()
    with pytest.raises(ModelError, match=rf"and {len(expected) - 5} more"):
        check_weights(Path("m"), {}, expected, tied=False)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_quantised_weights_are_not_read_as_plain_numbers(kernels: Literal["torch", "auto"], tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "model", config=tiny_config(), weights=tiny_weights(tiny_config()))
    (path,), name = folder.glob("*.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path)
    with pytest.raises(ModelError, match=f"tensor {name} is of torch.int8"):
        load_target(folder, dtype="auto", device=CPU, attention=TorchAttention(), kernels=KernelChoice(kernels))
