"""GGUF: tensors and metadata against the gguf package, the Q/K order, and files that lie."""

from __future__ import annotations

import dataclasses
import math
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from specd.attention.torch_attention import TorchAttention
from specd.errors import ModelError
from specd.models.config import RopeConfig
from specd.models.gguf import GgufFile, read_header, read_metadata
from specd.models.llama import Llama
from specd.models.registry import load_target
from tests.tiny import (
    CPU,
    LLAMA3_ROPE,
    ReferenceAttention,
    greedy,
    tiny_config,
    tiny_llama,
    tiny_weights,
    write_gguf,
)

CONFIG = tiny_config(tied=True)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def file_of(
    path: Path, *, entries: bytes = b"", num_entries: int = 0, infos: bytes = b"", num_tensors: int = 0
) -> Path:
    """A GGUF file by hand, with 64 bytes of tensor data."""
    body = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries) + entries + infos
    path.write_bytes(body + bytes(-len(body) % 32) + bytes(64))
    return path


def info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_read_back_in_the_half_split_order(tied: bool, tmp_path: Path) -> None:
    config = tiny_config(tied=tied, qkv_bias=True)
    file = GgufFile(write_gguf(tmp_path / "m.gguf", config=config))
    assert dataclasses.replace(file.config, rms_norm_eps=1e-5) == config  # the file has it in f32
    assert file.config.rms_norm_eps == pytest.approx(1e-5, rel=1e-6)
    weights = tiny_weights(config)
    assert set(file) == set(weights)
    for name, tensor in weights.items():
        assert file[name].dtype == torch.float32
        assert torch.equal(file[name], tensor), name


def test_a_file_computes_what_its_weights_compute(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", config=CONFIG)
    loaded = load_target(path, dtype="auto", device=CPU, attention=TorchAttention())
    assert greedy(loaded.model, [5, 6, 7], 12) == greedy(tiny_llama(config=CONFIG), [5, 6, 7], 12)
    assert loaded.name == "m"
    assert loaded.model.head is loaded.model.embedding


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_tensors_are_the_gguf_packages_values(kind: str, tmp_path: Path) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "m.gguf", config=CONFIG, quantised=quantised)
    file = GgufFile(path)
    name = "model.layers.0.mlp.down_proj.weight"
    original = tiny_weights(CONFIG)[name]
    expected = gguf.quants.dequantize(gguf.quants.quantize(original.numpy(), quantised), quantised)
    assert np.array_equal(file[name].numpy(), expected)
    assert not torch.equal(file[name], original)
    assert torch.equal(file["model.norm.weight"], tiny_weights(CONFIG)["model.norm.weight"])
    # Rows are whole blocks, so quantising commutes with the order of rows.
    query = "model.layers.1.self_attn.q_proj.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(tiny_weights(CONFIG)[query].numpy(), quantised), quantised)
    assert np.array_equal(file[query].numpy(), expected)


def test_rope_freqs_are_llama3_scaling(tmp_path: Path) -> None:
    from specd.models.layers import inverse_frequencies

    scaled = tiny_config(tied=True, rope=LLAMA3_ROPE)
    plain = inverse_frequencies(RopeConfig(), 16)
    factors = (plain / inverse_frequencies(LLAMA3_ROPE, 16)).tolist()
    assert max(factors) > 2
    path = write_gguf(tmp_path / "m.gguf", config=scaled, freq_factors=factors)
    file = GgufFile(path)
    torch.testing.assert_close(inverse_frequencies(file.config.rope, 16), inverse_frequencies(LLAMA3_ROPE, 16))
    model = Llama(file.config, file, attention=ReferenceAttention(), dtype=torch.float32, device=CPU)
    prompt = list(range(40))
    assert greedy(model, prompt, 12) == greedy(tiny_llama(config=scaled), prompt, 12)
    assert greedy(model, prompt, 12) != greedy(tiny_llama(config=CONFIG), prompt, 12)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.attention.sliding_window": 64}, "sliding window"),
        ({"split.count": 2}, "split"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(metadata: dict[str, int | str], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=named):
        GgufFile(write_gguf(tmp_path / "m.gguf", metadata=metadata))


def test_ids_and_linear_scaling_come_from_the_metadata(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.bos_token_id": 1}
    scaling: dict[str, int | str] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4}
    loaded = load_target(
        write_gguf(tmp_path / "m.gguf", metadata=ids | scaling), dtype="auto", device=CPU, attention=TorchAttention()
    )
    assert (loaded.eos_ids, loaded.bos_id, loaded.generation_defaults) == ((2, 5), 1, {})
    assert (loaded.config.rope.kind, loaded.config.rope.factor) == ("linear", 4.0)


def test_other_architectures_are_named(tmp_path: Path) -> None:
    entries = text("general.architecture") + struct.pack("<I", 8) + text("qwen3moe")
    with pytest.raises(ModelError, match="qwen3moe"):
        GgufFile(file_of(tmp_path / "m.gguf", entries=entries, num_entries=1))


def test_tensors_that_do_not_match_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", config=CONFIG, metadata={"llama.vocab_size": 97})
    raw = path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    path.write_bytes(raw)
    with pytest.raises(
        ModelError, match=r"missing: model.layers.1.mlp.up_proj.weight; unexpected: blk.1.ffn_xx.weight"
    ):
        load_target(path, dtype="auto", device=CPU, attention=TorchAttention())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"])
def test_names_that_mean_one_tensor_are_refused(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", config=CONFIG)
    path.write_bytes(path.read_bytes().replace(text("blk.1.ffn_up.weight"), text(name)) + bytes(64))
    with pytest.raises(ModelError, match=r"twice|both model.layers.0.mlp.up_proj.weight"):
        GgufFile(path)


@pytest.mark.parametrize("factors", [[2.0], [1.0] * 7, [1.0] * 7 + [0.0], [-1.0] * 8, [math.nan] * 8, [math.inf] * 8])
def test_rope_freqs_that_turn_nothing_are_refused(factors: list[float], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", config=CONFIG, freq_factors=factors)
    with pytest.raises(ModelError, match=r"rope factors do not fit|not all positive"):
        load_target(path, dtype="auto", device=CPU, attention=TorchAttention())


def test_unreadable_quantisation_is_a_model_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", config=CONFIG)
    raw = path.read_bytes()
    name = text("output_norm.weight")
    start = raw.index(name) + len(name) + 4 + 8  # past the dimension count and the one dimension
    path.write_bytes(raw[:start] + struct.pack("<I", int(gguf.GGMLQuantizationType.I32)) + raw[start + 4 :])
    with pytest.raises(ModelError, match="I32"):
        GgufFile(path)["model.norm.weight"]


def test_metadata_is_plain_python(tmp_path: Path) -> None:
    entries = [
        text("a.text") + struct.pack("<I", 8) + text("héllo"),
        text("a.flag") + struct.pack("<I?", 7, True),
        text("a.int") + struct.pack("<Ii", 5, -3),
        text("a.float") + struct.pack("<If", 6, 0.5),
        text("a.texts") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text(""),
        text("a.ints") + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3),
        text("a.nested") + struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQ2B", 0, 2, 7, 8) + struct.pack("<IQ", 0, 0),
    ]
    path = file_of(tmp_path / "m.gguf", entries=b"".join(entries), num_entries=len(entries))
    assert read_metadata(path) == {
        "a.text": "héllo", "a.flag": True, "a.int": -3, "a.float": 0.5, "a.texts": ["x", ""], "a.ints": [1, -2, 3],
        "a.nested": [[7, 8], []],
    }  # fmt: skip
    assert read_metadata(path)["a.flag"] is True


def array_of(kind: int, count: int) -> bytes:
    return text("k") + struct.pack("<IIQ", 9, kind, count)


HOSTILE: dict[str, Callable[[Path], Path]] = {
    "tensor count": lambda p: file_of(p, num_tensors=1 << 60),
    "metadata count": lambda p: file_of(p, num_entries=1 << 60),
    "length of metadata key": lambda p: file_of(p, entries=struct.pack("<Q", 1 << 63) + b"k", num_entries=1),
    "length of 'k'": lambda p: file_of(p, entries=array_of(8, 1 << 61), num_entries=1),
    "length of 'k' .*fit": lambda p: file_of(p, entries=array_of(10, 1 << 61), num_entries=1),
    "nests too deep": lambda p: file_of(
        p, entries=text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50, num_entries=1
    ),
    "value type 99": lambda p: file_of(p, entries=text("k") + struct.pack("<I", 99) + bytes(20), num_entries=1),
    "appears twice": lambda p: file_of(p, entries=(text("k") + struct.pack("<IB", 0, 1)) * 2, num_entries=2),
    "UTF-8": lambda p: file_of(p, entries=struct.pack("<Q", 2) + b"\xff\xfe" + bytes(16), num_entries=1),
    "tensor 't' appears twice": lambda p: file_of(p, infos=info("t", [4], 0, 0) * 2, num_tensors=2),
    "5 dimensions": lambda p: file_of(p, infos=info("t", [1] * 5, 0, 0), num_tensors=1),
    "0 dimensions": lambda p: file_of(p, infos=info("t", [], 0, 0), num_tensors=1),
    "unknown type 77": lambda p: file_of(p, infos=info("t", [4], 77, 0), num_tensors=1),
    "whole blocks of 32": lambda p: file_of(p, infos=info("t", [33], 8, 0), num_tensors=1),
    "claims 68 bytes": lambda p: file_of(p, infos=info("t", [17], 0, 0), num_tensors=1),
    "offset 32": lambda p: file_of(p, infos=info("t", [16], 0, 32), num_tensors=1),
    "offset 3": lambda p: file_of(p, infos=info("t", [4], 0, 3), num_tensors=1),
    "claims [0-9]{30}": lambda p: file_of(p, infos=info("t", [1 << 50, 1 << 50], 0, 0), num_tensors=1),
    "'t' and 'u' overlap": lambda p: file_of(p, infos=info("t", [16], 0, 0) + info("u", [8], 0, 32), num_tensors=2),
    "array elements": lambda p: file_of(
        p, entries=text("k") + struct.pack("<IIQ", 9, 0, (1 << 22) + 1) + bytes((1 << 22) + 1), num_entries=1
    ),
    "array elements .*'l'": lambda p: file_of(
        p,
        entries=b"".join(text(k) + struct.pack("<IIQ", 9, 0, 3 << 20) + bytes(3 << 20) for k in "kl"),
        num_entries=2,
    ),
    "power of two": lambda p: file_of(p, entries=text("general.alignment") + struct.pack("<II", 4, 24), num_entries=1),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_hostile_files_are_refused(message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_header(HOSTILE[message](tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is an empty file, not a GGUF one"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "byte order"),
    ],
)
def test_other_files_are_refused(raw: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=message):
        read_metadata(path)
    with pytest.raises(ModelError, match="cannot be read"):
        read_metadata(tmp_path / "none.gguf")


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", config=tiny_config(num_layers=1, hidden_size=32, vocab_size=7, tied=True))
    whole = path.read_bytes()
    header_end = min(tensor.begin for tensor in read_header(path).tensors.values())
    last_end = max(tensor.begin + tensor.num_bytes for tensor in read_header(path).tensors.values())
    lengths = [*range(0, header_end, 7), *range(header_end, last_end, 997), last_end - 1]
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            read_header(path)


def test_damaged_files_never_raise_anything_else(tmp_path: Path) -> None:
    path, generator = write_gguf(tmp_path / "m.gguf", config=tiny_config(num_layers=1, tied=True)), random.Random(11)
    whole = path.read_bytes()
    header_end = min(tensor.begin for tensor in read_header(path).tensors.values())
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 6)):
            damaged[generator.randrange(4, header_end)] = generator.choice(
                (0, 1, 9, 127, 255, generator.randrange(256))
            )
        path.write_bytes(damaged)
        try:
            GgufFile(path)
        except ModelError:
            refused += 1
    assert refused > 200


def test_reading_metadata_needs_no_torch() -> None:
    code = "import sys, specd.models.gguf, specd.models.config, specd.models.fetch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.real
def test_the_real_files_metadata_equals_the_gguf_packages(real_model_path: Path) -> None:
    metadata = read_metadata(real_model_path)
    reader = gguf.GGUFReader(real_model_path)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert metadata == theirs
    ours = read_header(real_model_path).tensors
    assert {t.name: (t.data_offset, t.n_bytes, tuple(t.shape.tolist()[::-1])) for t in reader.tensors} == {
        name: (tensor.begin, tensor.num_bytes, tensor.shape) for name, tensor in ours.items()
    }
