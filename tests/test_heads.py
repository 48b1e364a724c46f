"""MTP heads: their files, the torch module against the method's equations, the kernels' one against both."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig as HfConfig
from transformers.modeling_layers import MtpLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from specd.errors import ModelError
from specd.models.heads import HeadFile, head_shapes
from specd.models.native import NativeLlama
from specd.models.native_head import NativeHead
from specd.tensors import TokenTree, with_tree
from tests.heads import (
    AWKWARD,
    DRAFT_IDS,
    NORMS,
    SWITCHES,
    VOCABULARY,
    Run,
    check_run,
    close,
    every_choice,
    head_config,
    head_file,
    ids,
    normal,
    paged,
    reference,
    torch_head,
)
from tests.native import KINDS, LEVELS, Kind, Projection, native_llama, needs_kernels, random_rows
from tests.tiny import LLAMA3_ROPE, make_batch


@every_choice
def test_the_torch_head_is_the_method(features: str, concat: str, feedback: str, draft_vocab_size: int | None) -> None:
    embedding, lm_head = 0.5 * normal(VOCABULARY, 40), 0.3 * normal(VOCABULARY, 40, seed=2)
    for switches in SWITCHES:
        config = head_config(
            features=features, concat=concat, feedback=feedback, draft_vocab_size=draft_vocab_size, **switches
        )
        file = head_file(config)
        run = Run(torch_head(file, embedding, lm_head), ids(11), normal(8, config.feature_size, seed=3))
        run.all([5, 3], extends=3)
        check_run(run, reference(file, embedding, lm_head, run.tokens, run.states), config)


@needs_kernels
@every_choice
def test_the_native_head_is_the_method(features: str, concat: str, feedback: str, draft_vocab_size: int | None) -> None:
    target = native_target()
    embedding, lm_head = (matrix.unpack(target.library) for matrix in (target.embedding, target.head))
    for switches in SWITCHES:
        config = head_config(
            features=features, concat=concat, feedback=feedback, draft_vocab_size=draft_vocab_size, **switches
        )
        file, tokens, states = head_file(config), ids(11), normal(8, config.feature_size, seed=3)
        native = Run(NativeHead(file, target=target), tokens, states).all([5, 3], extends=3)
        check_run(native, reference(file, embedding, lm_head, tokens, native.states), config)
        torch_run = Run(torch_head(file, embedding, lm_head), tokens, states).all([8], extends=3)
        close(native.logits, torch_run.logits, config)


def native_target(**options: Any) -> NativeLlama:
    """A target whose embedding and head fit head_config()."""
    return native_llama(**({"kind": Kind.F32, "activations": "exact", "hidden_size": 40} | options))


@pytest.mark.parametrize("flag", [*NORMS, "fusion_bias", "attention_bias"])
def test_every_switch_changes_the_reference(flag: str) -> None:
    """The comparisons above could not see a flag that does nothing."""
    embedding, lm_head = normal(VOCABULARY, 40), normal(VOCABULARY, 40, seed=2)
    tokens, states = ids(4), list(normal(4, 40, seed=3))
    seen = []
    for value in (True, False):
        full = head_file(head_config(fusion_bias=True, attention_bias=True))
        config = dataclasses.replace(full.config, **{flag: value})
        file = HeadFile(config, {name: full.weights[name] for name in head_shapes(config)}, None, {})
        seen.append(reference(file, embedding, lm_head, tokens, states)[2])
    assert (seen[0] - seen[1]).abs().max() > 1e-2


def test_a_head_of_transformers() -> None:
    """transformers' MtpLayer around its Llama layer, weight by weight."""
    hf = HfConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, attn_implementation="eager",
    )  # fmt: skip
    for hidden_first in (False, True):
        hf.mtp_hidden_states_first = hidden_first
        layer = MtpLayer(hf, LlamaDecoderLayer, LlamaRMSNorm, 0).eval()
        with torch.no_grad():
            for i, parameter in enumerate(layer.parameters()):
                parameter.copy_((parameter.ndim == 1) + 0.2 * normal(*parameter.shape, seed=i))
        names = {"mtp_block": "layer", "post_norm": "norm"}
        weights = {".".join(names.get(p, p) for p in n.split(".")): t.detach() for n, t in layer.state_dict().items()}
        config = head_config(
            hidden_size=64, intermediate_size=96, concat="hidden_first" if hidden_first else "embedding_first"
        )
        assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == head_shapes(config)
        embedding, tokens, states = normal(VOCABULARY, 64), ids(10), normal(10, 64, seed=3)
        positions = torch.arange(10)[None]
        angles = LlamaRotaryEmbedding(hf)(states[None], positions)
        mask = torch.full((10, 10), -math.inf).triu(1)[None, None]
        with torch.inference_mode():
            expected = layer(embedding[tokens][None], states[None], angles, mask, positions, None)[0]
        head = torch_head(HeadFile(config, weights, None, {}), embedding, embedding)
        torch.testing.assert_close(
            torch.stack(Run(head, tokens, states).all([10], extends=0).outs), expected, atol=2e-5, rtol=1e-5
        )


# The kernels' invariant ----------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


LONG = 140  # pairs: three segments of attention


def wide_head(level: str, activations: str, quantize: str, **overrides: Any) -> NativeHead:
    """H = 96, so that rows quantise; weights bf16, as on disk."""
    config = head_config(hidden_size=96, intermediate_size=160, rope=LLAMA3_ROPE, **(AWKWARD | overrides))
    target = native_llama(level=level, activations=activations, kind=Kind.Q8_0, hidden_size=96)  # type: ignore[arg-type]
    return NativeHead(head_file(config, dtype=torch.bfloat16), target=target, quantize=quantize)


def in_chunks(
    head: NativeHead,
    tokens: torch.Tensor,
    states: torch.Tensor,
    chunks: list[int],
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, fed back) of every pair."""
    num_pages = -(-len(tokens) // page_size)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
    kv, outs, fed, done = paged(head, num_pages=num_pages, page_size=page_size, dtype=dtype), [], [], 0
    for length in chunks:
        batch = make_batch([(length, done + length, pages)], page_size=page_size)
        some = slice(done, done + length)
        m, back = head.forward(tokens[some], states[some], batch, kv, own=states.shape[1] == 96)
        outs.append(head.logits(m))
        fed.append(back)
        done += length
    return torch.cat(outs), torch.cat(fed)


@needs_kernels
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("own", [False, True], ids=["features", "own"])
@pytest.mark.parametrize("quantize", ["none", "q8_0"])
@pytest.mark.parametrize("activations", ["fast", "exact"])
def test_chunks_pages_threads_and_levels_do_not_matter(activations: str, quantize: str, own: bool) -> None:
    tokens, states = ids(LONG), normal(LONG, 96 if own else 288)
    torch.set_num_threads(1)
    expected = in_chunks(wide_head("portable", activations, quantize), tokens, states, [LONG])
    assert expected[1].isfinite().all()
    for level in LEVELS:
        head = wide_head(level, activations, quantize)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for chunks, page_size in (([LONG], 16), ([1] * LONG, 16), ([63, 2, 16, 5, 54], 1), ([17] * 8 + [4], 5)):
                got = in_chunks(head, tokens, states, chunks, page_size=page_size)
                for mine, theirs in zip(got, expected, strict=True):
                    assert torch.equal(mine, theirs), (level, count, chunks)


@needs_kernels
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("feedback", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_the_best_come_with_the_forward(native: bool, feedback: str) -> None:
    """The same tokens and states as asked for afterwards, of any rows, in any order."""
    overrides: dict[str, Any] = {"feedback": feedback, "draft_vocab_size": len(DRAFT_IDS)}
    file = head_file(head_config(**overrides))
    matrices = 0.5 * normal(VOCABULARY, 40), 0.3 * normal(VOCABULARY, 40, seed=2)
    head = NativeHead(file, target=native_target()) if native else torch_head(file, *matrices)
    tokens, states, rows = ids(13), normal(13, head.config.feature_size), torch.tensor([12, 3, 12, 0])
    batch = make_batch([(9, 9, [0]), (4, 4, [1])])
    for count in (1, 2):
        torch.set_num_threads(count)
        out, fed_back = head.forward(tokens, states, batch, paged(head, num_pages=2, page_size=16), own=False)
        kv = paged(head, num_pages=2, page_size=16)
        best, hidden = head.forward_best(tokens, states, batch, kv, rows, own=False)
        assert torch.equal(best, head.logits(out[rows]).argmax(-1))
        assert torch.equal(hidden, fed_back[rows])
        with pytest.raises((ModelError, IndexError)):
            head.forward_best(tokens, states, batch, kv, torch.tensor([13]), own=False)


@needs_kernels
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("activations", ["fast", "exact"])
def test_batch_mates_do_not_matter(activations: str) -> None:
    """A prefill, a decode and a padded row together, in two orders, against each alone."""
    head = wide_head("", activations, "q8_0")
    lengths, fresh = (70, 9, 130), (40, 1, 5)
    texts = [(ids(n, seed), normal(n, 288, seed=seed)) for seed, n in enumerate(lengths)]
    alone = [in_chunks(head, *text, [len(text[0])])[0][-new:] for text, new in zip(texts, fresh, strict=True)]
    for order, count in itertools.product(([0, 1, 2], [2, 0, 1]), (1, 2)):
        torch.set_num_threads(count)
        kv = paged(head, num_pages=27, page_size=16)
        pages = [list(range(9 * i, 9 * i + 9)) for i in range(3)]
        for i, (tokens, states) in enumerate(texts):
            old = lengths[i] - fresh[i]
            head.forward(tokens[:old], states[:old], make_batch([(old, old, pages[i])]), kv, own=False)
        batch = make_batch([(fresh[i], lengths[i], pages[i]) for i in order])
        tokens, states = (torch.cat([texts[i][part][-fresh[i] :] for i in order]) for part in (0, 1))
        m, _ = head.forward(tokens, states, batch, kv, own=False)
        assert torch.equal(head.logits(m), torch.cat([alone[i] for i in order])), (order, count)


@needs_kernels
def test_junk_slots_are_written_again_before_they_are_read() -> None:
    """What a PADDED refill leaves past a row's length, a NaN among it, changes nothing later."""
    head = wide_head("", "fast", "none")
    tokens, states = ids(20), normal(20, 288)
    clean = in_chunks(head, tokens, states, [12, 8])
    kv = paged(head)
    pages = [7, 2, 9, 0, 11]
    junk = torch.cat((states[:12], torch.full((3, 288), math.nan)))
    m, _ = head.forward(ids(15, seed=9).index_copy(0, torch.arange(12), tokens[:12]), junk,
                        make_batch([(15, 15, pages)], page_size=4), kv, own=False)  # fmt: skip
    assert torch.equal(head.logits(m[:12]), clean[0][:12])
    assert m[12:].isnan().all()
    m, _ = head.forward(tokens[12:], states[12:], make_batch([(8, 20, pages)], page_size=4), kv, own=False)
    assert torch.equal(head.logits(m), clean[0][12:])


@needs_kernels
def test_a_tree_gives_what_its_chains_would() -> None:
    parents, depths = [-1, 0, 0, 1, 1, 2, 4], [0, 1, 1, 2, 2, 2, 3]
    head = wide_head("", "fast", "none")
    tokens, states, drafted, own = ids(61), normal(61, 288), ids(7, seed=8), normal(7, 96, seed=9)

    def after_prefix(tokens_then: torch.Tensor, states_then: torch.Tensor, tree: TokenTree | None) -> torch.Tensor:
        kv, pages = paged(head, num_pages=9, page_size=8), list(range(9))
        head.forward(tokens, states, make_batch([(61, 61, pages)], page_size=8), kv, own=False)
        batch = make_batch([(len(tokens_then), 61 + len(tokens_then), pages)], page_size=8)
        batch = batch if tree is None else with_tree(batch, tree)
        return head.logits(head.forward(tokens_then, states_then, batch, kv, own=True)[0])

    logits = after_prefix(drafted, own, TokenTree(drafted[None], torch.tensor([parents]), torch.tensor([depths])))
    for node in range(7):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        assert torch.equal(logits[node], after_prefix(drafted[path], own[path], None)[-1]), node


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_kv(dtype: torch.dtype) -> None:
    head, tokens, states = wide_head("", "fast", "none"), ids(40), normal(40, 288)
    wide, narrow = (in_chunks(head, tokens, states, [40], dtype=t)[1] for t in (torch.float32, dtype))
    assert 0 < (narrow - wide).abs().max() < 0.05 * wide.abs().max()


# The draft vocabulary, sizes, refusals -------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_draft_vocabulary_has_the_targets_own_logits(kind: Kind, level: str) -> None:
    """Row by row the same bits, in every format: rows are taken as they are packed."""
    for activations in ("fast", "exact"):
        target = packed_target(kind, level, activations)
        config = head_config(hidden_size=256, draft_vocab_size=len(DRAFT_IDS))
        head = NativeHead(head_file(config), target=target)
        m = normal(5, 256)
        logits, inside = head.logits(m), torch.zeros(VOCABULARY).bool().index_fill(0, DRAFT_IDS, True)
        assert torch.equal(logits[:, inside], target.logits(m)[:, inside])
        assert (logits[:, ~inside] == -math.inf).all()
        assert logits.shape == (5, VOCABULARY)


def packed_target(kind: Kind, level: str, activations: str) -> NativeLlama:
    """A target of the kernels whose embedding and head are in a format; the K formats have no quantiser here."""
    model = native_llama(kind=Kind.F32, level=level, activations=activations, hidden_size=256, num_layers=1)  # type: ignore[arg-type]
    matrix = Projection(random_rows(kind, VOCABULARY, 256), level=level).matrix
    model.embedding = model.head = matrix
    model._prepare()
    return model


def test_sizes_of_heads() -> None:
    """Own weights only: the target's embedding and lm_head are nobody's twice."""
    embedding = normal(VOCABULARY, 40)
    for extra, overrides in ((0, {}), (19 * 40 * 4, {"draft_vocab_size": 19})):
        file = head_file(head_config(features="aux", **overrides))
        own = sum(tensor.nbytes for tensor in file.weights.values())
        assert torch_head(file, embedding, embedding).weight_bytes() == own + extra


@needs_kernels
def test_sizes_of_native_heads() -> None:
    plain, small = (wide_head("", "fast", quantize).weight_bytes() for quantize in ("none", "q8_0"))
    whole = wide_head("", "fast", "none", draft_vocab_size=None).weight_bytes()
    rows = 2 * 1664  # the 19 ids lie in two strips of Q8_0: 16 * (96 + 3 * 2) bytes, in steps of 64
    assert plain - whole == rows
    assert 0.5 < (small - rows) / (plain - rows) < 0.6  # 34 bytes for 64, norms and biases aside


@needs_kernels
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"hidden_size": 48}, "hidden_size of 48, the target one of 40"),
        ({"vocab_size": 96}, "vocab_size of 96, the target one of 97"),
        ({"head_dim": 24}, "head_dim 24"),
        ({"num_heads": 3}, "3 query heads cannot share 2"),
    ],
)
def test_heads_that_do_not_fit_are_refused(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        NativeHead(head_file(head_config(**overrides)), target=native_target())


@needs_kernels
def test_ids_that_the_target_does_not_have_are_refused() -> None:
    file = head_file(head_config(draft_vocab_size=len(DRAFT_IDS)))
    for bad in (VOCABULARY, -1):
        ids_with_one_bad = DRAFT_IDS.index_fill(0, torch.tensor([4]), bad)
        with pytest.raises(ModelError, match="out of its range"):
            NativeHead(dataclasses.replace(file, token_ids=ids_with_one_bad), target=native_target())


@needs_kernels
@pytest.mark.parametrize(("field", "value"), [("tokens", VOCABULARY), ("tokens", -1), ("write_slots", 12 * 4)])
def test_indices_out_of_range_are_refused(field: str, value: int) -> None:
    head, tokens, batch = (
        NativeHead(head_file(head_config()), target=native_target()),
        ids(4),
        make_batch([(4, 4, [0])], page_size=4),
    )
    (tokens if field == "tokens" else batch.write_slots)[2] = value
    with pytest.raises(ModelError, match="out of its range"):
        head.forward(tokens, normal(4, 40), batch, paged(head), own=False)


@needs_kernels
@pytest.mark.parametrize("features", ["last", "aux"])
def test_states_of_another_width_are_refused(features: str) -> None:
    head = NativeHead(head_file(head_config(features=features)), target=native_target())
    for width, own in ((39, False), (39, True), (120, True), (120, features == "aux" and True)):
        with pytest.raises(AssertionError):
            head.forward(ids(4), normal(4, width), make_batch([(4, 4, [0])], page_size=4), paged(head), own=own)


@needs_kernels
def test_an_empty_batch() -> None:
    head = NativeHead(head_file(head_config(**AWKWARD)), target=native_target())
    batch = make_batch([(0, 4, [0])], page_size=4)
    m, fed = head.forward(ids(0), torch.empty(0, 120), batch, paged(head), own=False)
    assert (m.shape, fed.shape, head.logits(m).shape) == ((0, 40), (0, 40), (0, VOCABULARY))


# Files ---------------------------------------------------------------------------------------------------------------
