"""An MTP head in the CPU kernels: the same interface as `specd.models.heads.Head`, one C call a forward.

The fusion of embedding and state (specd_fusion in the kernels' header) takes the embedding's place before the first
layer; layer, KV and attention are those of NativeLlama. A pair's result is the same bits in any batch, chunk or number
of threads.

Legend: T packed tokens, R logits rows, H hidden, F features (H or 3H), V the target's vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from specd.errors import ModelError
from specd.kernels.library import CFusion, CLayer, CLinear, CModel
from specd.kernels.pack import PackedMatrix, WeightMemory, address, linear_record, quantise_rows, rows_of_tensor
from specd.kv import PagedKV
from specd.models.base import ModelShape
from specd.models.heads import HeadConfig, HeadFile, head_shapes, spread
from specd.models.native import NativeLlama
from specd.models.native_run import NativeRun, RotaryTable
from specd.tensors import BatchInfo

_HEAD_STEP = 16  # the kernels' vectors along an attention head


class NativeHead:
    """Reads the target's embedding and lm_head as they are packed there, and computes in the target's `activations`.

    States and outputs are f32. A call uses `torch.get_num_threads()` threads; calls of all models take turns.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, file: HeadFile, *, target: NativeLlama, quantize: str = "none") -> None:
        """quantize: "none" (matrices stay as the file holds them) or "q8_0". Raises ModelError, naming both sides."""
        config = self.config = file.config
        _check(file, target)
        self.token_ids = file.token_ids
        self.library, self.activations = target.library, target.activations
        memory = WeightMemory()
        self.vectors = {n: t.detach().float().contiguous() for n, t in file.weights.items() if t.ndim == 1}
        self.matrices = self._packed(file.weights, memory, quantize)
        self.embedding = target.embedding
        self.lm_head = target.head
        if self.token_ids is not None:
            self.lm_head = target.head.picked(self.library, memory, self.token_ids)
        self.rotary = RotaryTable(config.rope, config.head_dim)
        self.shape = ModelShape(
            num_layers=1,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_position=config.max_position,
        )
        # What is fed back is not what the output head reads; without an output norm both are the same numbers.
        self._two = config.feedback == "pre_norm" and config.output_norm
        self._fusion, self._layer = self._fusion_record(), self._layer_record()
        self._run = NativeRun(self.library, self._model_record(), self.rotary)

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, batch: BatchInfo, kv: PagedKV, *, own: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head.forward`. Raises ModelError for a token, position, page or slot that does not exist."""
        states = self._states(tokens, states, own=own)
        out, before_norm = self._run.forward(tokens, batch, kv, aux_layers=(1,) if self._two else (), states=states)
        return out, out if before_norm is None else before_norm

    def forward_best(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        batch: BatchInfo,
        kv: PagedKV,
        rows: torch.Tensor,
        *,
        own: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head.forward_best`; one call and one parallel region. Raises ModelError as `forward` does."""
        states = self._states(tokens, states, own=own)
        aux_layers = (1,) if self._two else ()
        out, before_norm, best = self._run.forward_best(tokens, batch, kv, rows, aux_layers=aux_layers, states=states)
        return self._token(best.tokens), (out if before_norm is None else before_norm)[rows]

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """m [R, H] -> f32[R, V], -inf outside the draft vocabulary."""
        return spread(self._run.logits(out), self.token_ids, self.config.vocab_size)

    def best(self, out: torch.Tensor) -> torch.Tensor:
        """m [R, H] -> i64[R]: the most likely tokens."""
        return self._token(self._run.best(out).tokens)

    def weight_bytes(self) -> int:
        """Of its own weights: the embedding is the target's, and so is a whole lm_head."""
        own = list(self.matrices.values()) + ([] if self.token_ids is None else [self.lm_head])
        norms = [vector for name, vector in self.vectors.items() if name.endswith("norm.weight")]
        return sum(matrix.nbytes for matrix in own) + sum(vector.nbytes for vector in norms)

    def _states(self, tokens: torch.Tensor, states: torch.Tensor, *, own: bool) -> torch.Tensor:
        width = self.config.hidden_size if own else self.config.feature_size
        assert states.shape == (len(tokens), width), (states.shape, own)
        return states.float().contiguous()

    def _token(self, places: torch.Tensor) -> torch.Tensor:
        """Places in the draft vocabulary -> tokens."""
        return places if self.token_ids is None else self.token_ids[places]

    def _packed(
        self, weights: Mapping[str, torch.Tensor], memory: WeightMemory, quantize: str
    ) -> dict[str, PackedMatrix]:
        matrices = {}
        for name, tensor in weights.items():
            if tensor.ndim != 2:
                continue
            rows = rows_of_tensor(tensor)
            if quantize == "q8_0":
                rows = quantise_rows(rows, name)
            bias = weights.get(name.removesuffix("weight") + "bias")
            matrices[name.removesuffix(".weight")] = PackedMatrix(self.library, memory, rows, name=name, bias=bias)
        return matrices

    def _norm(self, name: str) -> int | None:
        """Where a norm's weights are; None, the identity, when the head has none."""
        vector = self.vectors.get(f"{name}.weight")
        return None if vector is None else address(vector)

    def _fusion_record(self) -> CFusion:
        features = self.matrices.get("feature_proj")
        return CFusion(
            embedding_norm=self._norm("enorm"),
            state_norm=self._norm("hnorm"),
            proj=linear_record(self.matrices["eh_proj"]),
            features=CLinear() if features is None else linear_record(features),
            hidden_first=int(self.config.concat == "hidden_first"),
        )

    def _layer_record(self) -> CLayer:
        q, k, v, output = (self.matrices[f"layer.self_attn.{name}_proj"] for name in "qkvo")
        return CLayer(
            input_norm=self._norm("layer.input_layernorm"),
            mlp_norm=self._norm("layer.post_attention_layernorm"),
            qkv=linear_record(q, k, v),
            output=linear_record(output),
            gate=self.matrices["layer.mlp.gate_proj"].record(),
            up=self.matrices["layer.mlp.up_proj"].record(),
            down=linear_record(self.matrices["layer.mlp.down_proj"]),
        )

    def _model_record(self) -> CModel:
        config = self.config
        return CModel(
            layers=ctypes.pointer(self._layer),
            norm=self._norm("norm"),
            embedding=self.embedding.record(),
            head=self.lm_head.record(),
            num_layers=1,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            activations=int(self.activations == "fast"),
            fusion=ctypes.pointer(self._fusion),
        )


def _check(file: HeadFile, target: NativeLlama) -> None:
    """Whatever C takes on trust. Raises ModelError."""
    config, shape = file.config, target.shape
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, shape.hidden_size),
        ("vocab_size", config.vocab_size, shape.vocab_size),
    ):
        if ours != theirs:
            raise ModelError(f"the head has a {name} of {ours}, the target one of {theirs}")
    reason = _unsupported(config)
    if reason is not None:
        raise ModelError(f"the CPU kernels cannot run this head: {reason}")
    found = {name: tuple(tensor.shape) for name, tensor in file.weights.items()}
    assert found == head_shapes(config), sorted(found.items() ^ head_shapes(config).items())


def _unsupported(config: HeadConfig) -> str | None:
    if config.head_dim % _HEAD_STEP:
        return f"its head_dim {config.head_dim} is not a multiple of {_HEAD_STEP}"
    if config.num_heads % config.num_kv_heads:
        return f"its {config.num_heads} query heads cannot share {config.num_kv_heads} key/value heads evenly"
    return None
