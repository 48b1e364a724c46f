"""The Llama family's forward in specd's own CPU kernels: one call and one parallel region for all layers.

    activations = "fast"   int8, one scale a row and group of 32 columns (as llama.cpp); its reference is itself:
                           a row's result is the same bits in any batch, chunk, or number of threads
    activations = "exact"  fp32 against the dequantised weights: to be compared with transformers

Legend: T packed tokens, R logits rows, H hidden, V logits width, D head size.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, Protocol

import torch

from specd.errors import ModelError
from specd.kernels.library import CLayer, CModel, Library, load_library
from specd.kernels.pack import PackedMatrix, Rows, WeightMemory, address, linear_record, quantise_rows, rows_of_tensor
from specd.kernels.top import top_of_hidden
from specd.kv import PagedKV
from specd.models.base import ModelShape, feature_layers
from specd.models.config import LlamaConfig
from specd.models.native_run import NativeRun, RotaryTable
from specd.tensors import BatchInfo, BestTokens, TopTokens

Activations = Literal["fast", "exact"]
_HEAD_STEP = 16  # the kernels' vectors along a head
_CPU = torch.device("cpu")


class WeightSource(Protocol):
    """Where weights come from: vectors as tensors, matrices as the file's own rows."""

    def __getitem__(self, name: str, /) -> torch.Tensor: ...

    def get(self, name: str, /) -> torch.Tensor | None: ...

    def rows(self, name: str) -> Rows: ...


class TensorSource(Mapping[str, torch.Tensor]):
    """Weights that are plain tensors (safetensors, tests) as a WeightSource."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def rows(self, name: str) -> Rows:
        return rows_of_tensor(self._tensors[name])


def unsupported(config: LlamaConfig) -> str | None:
    """Why the kernels cannot compute a model, or None."""
    if config.head_dim % _HEAD_STEP:
        return f"its head size {config.head_dim} is not a multiple of {_HEAD_STEP}"
    return None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NativeLayer:
    """One layer's weights; vectors are f32."""

    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    matrices: Mapping[str, PackedMatrix]  # by their Hugging Face names within the layer

    def record(self) -> CLayer:
        q, k, v, output = (self.matrices[f"self_attn.{name}_proj"] for name in "qkvo")
        return CLayer(
            input_norm=address(self.input_norm),
            mlp_norm=address(self.mlp_norm),
            qkv=linear_record(q, k, v),
            output=linear_record(output),
            gate=self.matrices["mlp.gate_proj"].record(),
            up=self.matrices["mlp.up_proj"].record(),
            down=linear_record(self.matrices["mlp.down_proj"]),
        )


class NativeLlama:
    """`specd.models.base.Model` on the CPU. Hidden states, logits and features are f32; KV may be narrower.

    A call uses `torch.get_num_threads()` threads. Calls of all models of the process take turns.
    """

    dtype = torch.float32
    device = _CPU

    def __init__(
        self,
        config: LlamaConfig,
        source: WeightSource,
        *,
        activations: Activations = "fast",
        quantize: str = "none",
        library: Library | None = None,
    ) -> None:
        """quantize: "none" or "q8_0" (matrices that the file holds unquantised). Raises ModelError."""
        reason = unsupported(config)
        if reason is not None:
            raise ModelError(f"the CPU kernels cannot run this model: {reason}")
        self.library = library or load_library()
        self.config = config
        self.activations = activations
        reader = _Reader(source, self.library, quantize)
        self.embedding = reader.matrix("model.embed_tokens.weight")
        self.layers = [reader.layer(index, config) for index in range(config.num_layers)]
        self.norm = reader.vector("model.norm.weight")
        self.head = self.embedding if config.tied else reader.matrix("lm_head.weight")
        self.rotary = RotaryTable(config.rope, config.head_dim)
        self.shape = ModelShape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=self.head.num_rows,
            max_position=config.max_position,
        )
        self._prepare()

    def _prepare(self) -> None:
        """The records that C reads, and this copy's own scratch."""
        config = self.config
        self._layer_records = (CLayer * len(self.layers))(*(layer.record() for layer in self.layers))
        record = CModel(
            layers=self._layer_records,
            norm=address(self.norm),
            embedding=self.embedding.record(),
            head=self.head.record(),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            activations=int(self.activations == "fast"),
        )
        self._run = NativeRun(self.library, record, self.rotary)

    def truncated(self, num_layers: int) -> NativeLlama:
        """The first `num_layers` layers with the same norm and head, sharing every weight. Needs its own KV."""
        if not 1 <= num_layers <= len(self.layers):
            raise ModelError(
                f"a model of {len(self.layers)} layers has no first {num_layers}; ask for 1 or more of them"
            )
        model = copy.copy(self)
        model.layers = self.layers[:num_layers]
        model.config = dataclasses.replace(self.config, num_layers=num_layers)
        model.shape = dataclasses.replace(self.shape, num_layers=num_layers)
        model._prepare()
        return model

    def with_layers(self, config: LlamaConfig, source: WeightSource, *, quantize: str) -> NativeLlama:
        """Other layers and another final norm between the same embedding and head. Needs its own KV."""
        reader = _Reader(source, self.library, quantize)
        model = copy.copy(self)
        model.layers = [reader.layer(index, config) for index in range(config.num_layers)]
        model.norm = reader.vector("model.norm.weight")
        model.config = config
        model.shape = dataclasses.replace(self.shape, num_layers=config.num_layers)
        model._prepare()
        return model

    def prepare(self, batch: BatchInfo) -> BatchInfo:
        return batch  # the kernels read the batch as it is

    def forward(
        self, tokens: torch.Tensor, batch: BatchInfo, kv: PagedKV, *, features: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Model.forward`. Raises ModelError for a token, position, page or slot that does not exist."""
        hidden, aux = self._run.forward(tokens, batch, kv, aux_layers=feature_layers(features, len(self.layers)))
        return hidden, hidden if features == "last" else aux

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] after the final norm -> [R, V]; V counts padding rows of the head."""
        return self._run.logits(hidden)

    def best(self, hidden: torch.Tensor) -> BestTokens:
        """hidden [R, H] -> the largest logits; no row of logits is ever written."""
        return self._run.best(hidden)

    def top(self, hidden: torch.Tensor, k: int) -> TopTokens:
        """hidden [R, H] -> the k largest logits and the sum over all; no row of logits is ever written."""
        return top_of_hidden(self.library, self._run.model, hidden, k)

    def weight_bytes(self) -> int:
        """Bytes of distinct weights as they are kept; a tied head counts once."""
        packed = {id(m): m.nbytes for layer in self.layers for m in layer.matrices.values()}
        packed |= {id(m): m.nbytes for m in (self.embedding, self.head)}
        vectors = [self.norm, *(v for layer in self.layers for v in (layer.input_norm, layer.mlp_norm))]
        return sum(packed.values()) + sum(vector.nbytes for vector in vectors)


class _Reader:
    """Takes weights by name and packs them."""

    def __init__(self, source: WeightSource, library: Library, quantize: str) -> None:
        self.source = source
        self.library = library
        self.quantize = quantize
        self.memory = WeightMemory()

    def vector(self, name: str) -> torch.Tensor:
        return self.source[name].detach().to(torch.float32, copy=True).contiguous()

    def matrix(self, name: str) -> PackedMatrix:
        rows = self.source.rows(name)
        if self.quantize == "q8_0":
            rows = quantise_rows(rows, name)
        bias = self.source.get(name.removesuffix("weight") + "bias")
        return PackedMatrix(self.library, self.memory, rows, name=name, bias=bias)

    def layer(self, index: int, config: LlamaConfig) -> NativeLayer:
        prefix = f"model.layers.{index}."
        names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        return NativeLayer(
            input_norm=self.vector(prefix + "input_layernorm.weight"),
            mlp_norm=self.vector(prefix + "post_attention_layernorm.weight"),
            matrices={name: self.matrix(f"{prefix}{name}.weight") for name in names},
        )
