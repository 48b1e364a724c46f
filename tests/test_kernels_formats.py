"""The kernels' pieces against their references: formats, projections in both modes, exp and silu, bad numbers."""

from __future__ import annotations

import math

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from specd.errors import ModelError
from specd.kernels.library import load_library
from specd.kernels.pack import PackedMatrix, Rows, WeightMemory, quantise_rows, rows_of_tensor
from tests.native import FLOATS, KINDS, LEVELS, QUANTISED, Kind, Projection, dequantised, needs_kernels, random_rows

pytestmark = needs_kernels
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS)


def inputs(rows: int, cols: int, seed: int = 1) -> torch.Tensor:
    """Rows of very different sizes, as residual streams have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    x[:, ::37] *= 20.0
    return x


def quantised_inputs(x: torch.Tensor) -> torch.Tensor:
    """What the fast mode reads: int8 with one scale for each row and group of 32, in f64."""
    groups = x.view(len(x), -1, 32)
    peak = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > 0, 127.0 / peak, 0.0)
    return ((groups * inverse).round().double() * (peak / 127.0).double()).view(x.shape)


@EVERY_KIND
def test_packed_rows_hold_the_files_numbers(kind: Kind) -> None:
    rows = random_rows(kind, 37, 512)  # 37: the last strip is not full
    library = load_library("")
    packed = PackedMatrix(library, WeightMemory(), rows, name="w")
    assert torch.equal(packed.unpack(library), dequantised(rows))


@EVERY_KIND
def test_packed_bytes_are_the_files(kind: Kind) -> None:
    rows = random_rows(kind, 64, 1536)
    packed = PackedMatrix(load_library(""), WeightMemory(), rows, name="w")
    assert packed.nbytes <= rows.data.nbytes * 1.03  # sub-scales of Q4_K take whole bytes


@EVERY_LEVEL
@EVERY_KIND
def test_exact_projection(kind: Kind, level: str) -> None:
    rows, x = random_rows(kind, 37, 512), inputs(6, 512)
    expected = x.double() @ dequantised(rows).double().T
    got = Projection(rows, level=level)(x, activations="exact")
    size = x.double().abs() @ dequantised(rows).double().abs().T
    assert ((got - expected).abs() / size).max() < 1e-6


@EVERY_LEVEL
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_fast_projection(kind: Kind, level: str) -> None:
    rows, x = random_rows(kind, 37, 512), inputs(6, 512)
    weights = dequantised(rows).double()
    got = Projection(rows, level=level)(x, activations="fast").double()
    size = x.double().abs() @ weights.abs().T
    assert ((got - quantised_inputs(x) @ weights.T).abs() / size).max() < 1e-6
    error = (got - x.double() @ weights.T).norm() / (x.double() @ weights.T).norm()
    assert 1e-5 < error < 0.02  # int8 was really used, and is good enough


@EVERY_LEVEL
@pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: kind.name)
def test_float_weights_are_computed_in_fp32_in_both_modes(kind: Kind, level: str) -> None:
    rows, x = random_rows(kind, 20, 80), inputs(3, 80)  # 80 columns: half a group is padding
    projection = Projection(rows, level=level)
    assert torch.equal(projection(x, activations="fast"), projection(x, activations="exact"))


def test_bias_is_added() -> None:
    rows, bias, x = random_rows(Kind.Q8_0, 37, 64), torch.randn(37), inputs(3, 64)
    plain, biased = (Projection(rows, level="", bias=b)(x, activations="fast") for b in (None, bias))
    assert torch.equal(biased, plain + bias)


@EVERY_LEVEL
@pytest.mark.parametrize("activations", ["fast", "exact"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_spoils_itself_alone(bad: float, activations: str, level: str) -> None:
    projection = Projection(random_rows(Kind.Q4_1, 32, 64), level=level)
    x = inputs(5, 64)
    good = projection(x, activations=activations)
    x[2, 40] = bad
    spoilt = projection(x, activations=activations)
    assert not spoilt[2].isfinite().any()
    assert torch.equal(spoilt[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


@EVERY_LEVEL
def test_rows_of_zeros_and_of_tiny_numbers(level: str) -> None:
    rows = random_rows(Kind.Q4_0, 32, 64)
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-38), torch.full((64,), 1e-20)])
    got = Projection(rows, level=level)(x, activations="fast")
    assert torch.equal(got[0], torch.zeros(32))
    assert got.isfinite().all()
    torch.testing.assert_close(got[2], x[2] @ dequantised(rows).T, rtol=0.02, atol=1e-22)


@EVERY_LEVEL
def test_exp_and_silu(level: str) -> None:
    x = torch.cat([torch.linspace(-87, 88, 4001), torch.linspace(-1, 1, 999)])
    library = load_library(level)
    exp, silu = torch.empty_like(x), torch.empty_like(x)
    library.c.specd_exp(library.functions, x.data_ptr(), len(x), exp.data_ptr(), silu.data_ptr())
    wide = x.double()
    assert ((exp - wide.exp()) / wide.exp()).abs().max() < 2e-7
    torch.testing.assert_close(silu, torch.nn.functional.silu(wide).float(), rtol=5e-7, atol=1e-37)


@EVERY_LEVEL
def test_exp_at_the_edges(level: str) -> None:
    x = torch.tensor([-math.inf, -200.0, 0.0, -0.0, math.nan, 1000.0])
    library = load_library(level)
    exp, silu = torch.empty_like(x), torch.empty_like(x)
    library.c.specd_exp(library.functions, x.data_ptr(), len(x), exp.data_ptr(), silu.data_ptr())
    assert exp[:4].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert exp[4].isnan()
    assert exp[5] == pytest.approx(math.exp(88.0), rel=1e-6)
    assert silu[4].isnan()
    assert silu[5] == 1000.0


def test_tensors_keep_their_precision() -> None:
    for dtype, kind in ((torch.float32, Kind.F32), (torch.bfloat16, Kind.BF16), (torch.float16, Kind.F16)):
        tensor = torch.randn(5, 48).to(dtype)
        rows = rows_of_tensor(tensor.T.contiguous().T)
        assert rows.kind == int(kind)
        assert torch.equal(dequantised(rows), tensor.float())
    assert rows_of_tensor(torch.ones(2, 4, dtype=torch.float64)).kind == int(Kind.F32)


def test_quantise_on_request() -> None:
    plain = random_rows(Kind.BF16, 8, 96)
    rows = quantise_rows(plain, "w")
    assert rows.kind == int(Kind.Q8_0)
    assert (dequantised(rows) - dequantised(plain)).abs().max() < 0.01 * dequantised(plain).abs().max()
    assert quantise_rows(rows, "w") is rows  # what the file quantised stays as it is
    with pytest.raises(ModelError, match=r"w has 80 columns"):
        quantise_rows(random_rows(Kind.F32, 8, 80), "w")


def test_formats_without_a_kernel_are_named() -> None:
    kind = GGMLQuantizationType.Q5_0
    rows = Rows(int(kind), random_rows(Kind.Q8_0, 16, 64).data, 64)
    with pytest.raises(ModelError, match="Q5_0"):
        PackedMatrix(load_library(""), WeightMemory(), rows, name="w")
