"""NativeLlama against the torch Llama on tiny models; loading it; what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from specd.attention.torch_attention import TorchAttention
from specd.errors import ConfigError, ModelError
from specd.kernels import draw, library
from specd.kernels.library import load_library
from specd.models import native_run
from specd.models.config import LlamaConfig, RopeConfig
from specd.models.layers import inverse_frequencies, rms_norm, rope_angles
from specd.models.llama import Llama
from specd.models.native import NativeLlama, TensorSource, unsupported
from specd.models.native_run import RotaryTable
from specd.models.registry import KernelChoice, LoadedModel, load_target
from tests.native import LEVELS, Kind, QuantisedSource, native_llama, needs_kernels
from tests.test_llama import VARIANTS, tokens_of
from tests.tiny import (
    CPU,
    greedy,
    make_batch,
    make_kv,
    padded,
    tiny_config,
    tiny_llama,
    tiny_weights,
    write_gguf,
    write_hf_folder,
)

pytestmark = needs_kernels
NATIVE = {name: config for name, config in VARIANTS.items() if unsupported(config) is None}


def logits_of(model: Llama | NativeLlama, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    kv, parts, done = make_kv(model), [], 0
    with torch.inference_mode():
        for length in chunks:
            batch = make_batch([(length, done + length, [3, 1, 5, 0, 2, 7, 4, 6])])
            hidden, _ = model.forward(tokens[done : done + length], batch, kv)
            parts.append(model.logits(hidden))
            done += length
    return torch.cat(parts)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_1], ids=lambda kind: kind.name)
def test_exact_mode_equals_torch(kind: Kind, variant: str, level: str) -> None:
    config, tokens = NATIVE[variant], tokens_of(90)
    source = QuantisedSource(config, kind)
    reference = Llama(config, source, attention=TorchAttention(), dtype=torch.float32, device=CPU)
    expected = logits_of(reference, tokens, [90])
    got = logits_of(native_llama(config=config, kind=kind, activations="exact", level=level), tokens, [70, 1, 19])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def test_fast_mode_is_near_and_not_equal() -> None:
    tokens = tokens_of(60)
    exact, fast = (logits_of(native_llama(activations=mode), tokens, [60]) for mode in ("exact", "fast"))
    error = (fast - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.05


def test_greedy_text_of_both_implementations() -> None:
    config = tiny_config()
    source = TensorSource(tiny_weights(config))
    native = NativeLlama(config, source, activations="exact")
    assert greedy(native, [1, 2, 3], 40) == greedy(tiny_llama(config=config), [1, 2, 3], 40)


def test_features() -> None:
    config = tiny_config(num_layers=8)
    native = NativeLlama(config, TensorSource(tiny_weights(config)), activations="exact")
    tokens, batch = tokens_of(6), make_batch([(6, 6, [0])])
    hidden, last = native.forward(tokens, batch, make_kv(native), features="last")
    assert last is hidden
    for features, width in (("aux", 3), ("pre", 1)):
        model = tiny_llama(config=config)
        with torch.inference_mode():
            expected_hidden, expected = model.forward(tokens, batch, make_kv(model), features=features)
        _, found = native.forward(tokens, batch, make_kv(native), features=features)
        assert expected is not None
        assert expected.shape == (6, width * config.hidden_size)
        torch.testing.assert_close(hidden, expected_hidden, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    normed = rms_norm(expected, model.norm, config.rms_norm_eps)
    torch.testing.assert_close(normed, expected_hidden, atol=2e-5, rtol=1e-5)
    for features in ("aux", "first"):
        with pytest.raises(ModelError, match=features):
            native.truncated(2).forward(tokens, batch, make_kv(native), features=features)


def test_truncated_shares_weights_and_equals_a_shallower_model() -> None:
    model, same = native_llama(), native_llama(num_layers=2)
    shallow, tokens = model.truncated(2), tokens_of(12)
    assert torch.equal(logits_of(shallow, tokens, [12]), logits_of(same, tokens, [12]))
    assert shallow.layers[1] is model.layers[1]
    assert shallow.weight_bytes() == same.weight_bytes() < model.weight_bytes()
    assert (shallow.shape.num_layers, model.shape.num_layers) == (2, 3)
    del model  # the copy keeps the weights alive
    assert torch.equal(logits_of(shallow, tokens, [5, 7]), logits_of(same, tokens, [12]))
    for count in (0, 3):
        with pytest.raises(ModelError, match="2 layers"):
            shallow.truncated(count)


def test_an_empty_batch() -> None:
    model = native_llama()
    hidden, _ = model.forward(torch.empty(0, dtype=torch.int64), make_batch([(0, 4, [0])]), make_kv(model))
    assert hidden.shape == (0, 64)
    assert model.logits(hidden).shape == (0, 97)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", 97), ("tokens", -(1 << 40)), ("positions", 1 << 20), ("write_slots", 64 * 16), ("write_slots", -1)],
)
def test_indices_out_of_range_are_refused(field: str, value: int) -> None:
    """A late reader of a poisoned batch gets an error, not somebody's memory."""
    model, tokens, batch = native_llama(), tokens_of(4), make_batch([(4, 4, [0])])
    if field == "tokens":
        tokens[2] = value
    else:
        getattr(batch, field)[2] = value
    with pytest.raises(ModelError, match="out of its range"):
        model.forward(tokens, batch, make_kv(model))


def test_pages_out_of_range_are_refused() -> None:
    model = native_llama()
    with pytest.raises(ModelError, match="out of its range"):
        model.forward(tokens_of(4), make_batch([(4, 20, [0, 64])]), make_kv(model))


def test_head_sizes_without_kernels_are_refused() -> None:
    config = tiny_config(head_dim=24)
    with pytest.raises(ModelError, match="head size 24"):
        NativeLlama(config, TensorSource(tiny_weights(config)))


def load(path: Path, dtype: str = "auto", **choice: Any) -> LoadedModel:
    return load_target(path, dtype=dtype, device=CPU, attention=TorchAttention(), kernels=KernelChoice(**choice))


@pytest.mark.parametrize("kind", [None, Kind.Q4_1, Kind.Q8_0, Kind.Q4_0], ids=str)
def test_gguf_files_load(kind: Kind | None, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", quantised=kind)
    tokens = tokens_of(20)
    expected = logits_of(load(path).model, tokens, [20])
    loaded = load(path, kernels="native", activations="exact")
    assert (loaded.kernels, loaded.weight_bytes) == ("native exact", loaded.model.weight_bytes())
    torch.testing.assert_close(logits_of(loaded.model, tokens, [20]), expected, atol=2e-5, rtol=1e-5)
    assert load(path, kernels="auto").kernels == "native fast"
    assert load(path).kernels == "torch"


def test_folders_load_with_padding_and_on_request_quantised(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_hf_folder(tmp_path, config=config, weights=padded(tiny_weights(config), 104))
    plain, small = load(folder, kernels="native"), load(folder, kernels="native", quantize="q8_0")
    assert plain.model.shape.vocab_size == 104
    assert small.weight_bytes < 0.3 * plain.weight_bytes
    tokens = tokens_of(20)
    expected = logits_of(load(folder).model, tokens, [20])
    torch.testing.assert_close(logits_of(plain.model, tokens, [20]), expected, atol=2e-5, rtol=1e-5)
    error = (logits_of(small.model, tokens, [20]) - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05
    with pytest.raises(ModelError, match="needs the native kernels"):
        load(folder, quantize="q8_0")


@pytest.mark.parametrize(
    ("config", "dtype", "named"), [(tiny_config(head_dim=24), "auto", "head size"), (tiny_config(), "bf16", "bfloat16")]
)
def test_what_the_kernels_cannot_do_goes_to_torch(config: LlamaConfig, dtype: str, named: str, tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, config=config)
    with structlog.testing.capture_logs() as logs:
        assert load(folder, dtype, kernels="auto").kernels == "torch"
    assert [entry["event"] for entry in logs] == ["native_kernels_not_used"]
    assert named in logs[0]["reason"]
    with pytest.raises(ModelError, match=named):
        load(folder, dtype, kernels="native")


def test_a_library_that_was_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_MODULE", "specd.kernels.absent")
    library._open.cache_clear()
    library._load.cache_clear()
    try:
        with pytest.raises(ModelError, match="not built"):
            load(write_hf_folder(tmp_path, config=tiny_config()), kernels="native")
        assert load(tmp_path, kernels="auto").kernels == "torch"
    finally:
        library._open.cache_clear()
        library._load.cache_clear()


def test_the_environment_names_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in LEVELS:
        monkeypatch.setenv("SPECD_KERNELS", level)
        assert load_library().level == level
    monkeypatch.setenv("SPECD_KERNELS", "mmx")
    with pytest.raises(ConfigError, match="mmx"):
        load_library()


@pytest.mark.parametrize("kernels", ["torch", "auto", "native"])
def test_a_wrong_level_is_refused_before_any_request(
    kernels: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever computes the model, its tokens are drawn by the kernels."""
    monkeypatch.setenv("SPECD_KERNELS", "AVX2")
    draw.loaded.cache_clear()
    with pytest.raises(ConfigError, match="AVX2"):
        load(write_hf_folder(tmp_path, config=tiny_config()), kernels=kernels)


def test_a_library_without_openmp_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load_library(), "threaded", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with structlog.testing.capture_logs() as logs:
        load(write_hf_folder(tmp_path, config=tiny_config()), kernels="native")
    assert [entry["event"] for entry in logs] == ["native_kernels_single_threaded"]


def test_two_threads_grow_one_rotary_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target and a draft that shares its positions, on two streams."""
    together = threading.Barrier(2)

    def slow(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made = rope_angles(*arguments)
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.5)
        return made

    monkeypatch.setattr(native_run, "rope_angles", slow)
    table = RotaryTable(RopeConfig(), 16)
    threads = [threading.Thread(target=table.grow, args=(1000,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cosines, sines = table.grow(2000)
    expected = rope_angles(inverse_frequencies(RopeConfig(), 16), torch.arange(2048), torch.float32)
    assert torch.equal(cosines, expected[0][:, 0, :8])
    assert torch.equal(sines, expected[1][:, 0, :8])


def test_workspaces_of_copies_are_their_own() -> None:
    model = native_llama()
    copy = model.truncated(3)
    assert copy._run._workspace is not model._run._workspace
    assert dataclasses.replace(copy.shape) == model.shape
