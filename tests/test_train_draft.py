"""`specd train draft`: the differentiable draft is the one that serves, it learns, and its folder drafts."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from specd.attention.torch_attention import TorchAttention
from specd.cli import main
from specd.config import Config, ModelConfig, SchedulerConfig, SpeculationConfig
from specd.engine import Engine
from specd.errors import ConfigError, ModelError
from specd.models.borrowed import is_borrowing, load_borrowing, own_shapes, write_borrowing
from specd.models.config import LlamaConfig, RopeConfig
from specd.models.registry import KernelChoice, load_target
from specd.train.batches import follows, make_batch, sequences
from specd.train.collect import CollectSettings
from specd.train.collect import collect as collect_shards
from specd.train.corpus import Text
from specd.train.distil import DraftSettings, TrainableDraft, train
from specd.train.plan import Plan
from specd.train.run import Figures, Vocabulary, add_figures
from specd.train.shards import read_shards
from specd.train.target import read_frozen, read_layers
from tests.engines import ask, collect
from tests.native import needs_kernels
from tests.tiny import (
    CPU,
    LLAMA3_ROPE,
    make_kv,
    tiny_config,
    tiny_llama,
    tiny_weights,
    write_hf_folder,
)  # fmt: skip
from tests.tiny import (
    make_batch as make_paged_batch,
)
from tests.training import TORCH, changed, nearly_bigram, write_corpus

CONFIG = tiny_config(vocab_size=320, num_layers=6)  # of every byte, so that the folder has a tokenizer
KERNELS = [pytest.param("torch", id="torch"), pytest.param("native", id="native", marks=needs_kernels)]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose later layers say what the first two do not, and could; shards of sixty of its tokens."""
    folder = tmp_path_factory.mktemp("draft")
    weights = nearly_bigram(tiny_weights(CONFIG))
    for index in range(2, CONFIG.num_layers):
        weights[f"model.layers.{index}.mlp.down_proj.weight"] *= 5
    model = write_hf_folder(folder / "model", config=CONFIG, weights=weights)
    generator = np.random.default_rng(0)
    texts = []
    for index in range(80):
        ids = generator.integers(3, 63, int(generator.integers(16, 30))).astype(np.int32)
        texts.append(Text(ids, np.where(np.arange(len(ids)) < 4, 0, 2).astype(np.uint8), index % 4 == 0))
    corpus = write_corpus(folder / "corpus.safetensors", texts)
    collect_shards(CollectSettings(model, corpus, folder / "shards", batch_tokens=256, kernels=TORCH))
    return model, folder / "shards"


@pytest.fixture
def settings(places: tuple[Path, Path], tmp_path: Path) -> DraftSettings:
    plan = Plan(tmp_path / "run", epochs=2, batch_tokens=256, warmup=4, lr=2e-3, eval_every=4)
    return DraftSettings(places[0], (places[1],), plan, layers=2)


@pytest.fixture(scope="module")
def drafted(places: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder."""
    output = tmp_path_factory.mktemp("drafted") / "run"
    plan = Plan(output, epochs=30, batch_tokens=512, warmup=4, lr=3e-3, eval_every=30)
    train(DraftSettings(places[0], (places[1],), plan, layers=2))
    return output


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope": LLAMA3_ROPE, "tied": True}, {"qkv_bias": True}, {"output_bias": True, "mlp_bias": True}],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_the_differentiable_draft_is_the_served_one(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    served = tiny_llama(config=config).truncated(2)
    draft = TrainableDraft(served.config, tiny_weights(config), served.embedding)
    tokens = torch.randint(0, 97, (2, 21), generator=torch.Generator().manual_seed(0))
    out = draft.forward(tokens)
    with torch.inference_mode():
        batch = make_paged_batch([(21, 21, [0, 1]), (21, 21, [2, 3])])
        wanted, _ = served.forward(tokens.flatten(), batch, make_kv(served))
    torch.testing.assert_close(out.flatten(0, 1).detach(), wanted, rtol=1e-4, atol=1e-4)
    assert set(draft.weights) == set(own_shapes(served.config))
    out.square().mean().backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in draft.weights.values())


def test_a_draft_learns_what_its_layers_alone_do_not_say(drafted: Path) -> None:
    lines = [orjson.loads(line) for line in (drafted / "log.jsonl").read_bytes().splitlines()]
    looks = [line for line in lines if "held_out" in line]
    first, best = looks[0], max(looks, key=lambda line: line["kept"])
    assert best["held_out"]["top1"][0] > 1.8 * first["held_out"]["top1"][0]  # the control: the layers as they were
    assert best["held_out"]["overlap"][0] > 1.8 * first["held_out"]["overlap"][0]
    assert looks[-1]["held_out"]["loss"][0] < 0.3 * first["held_out"]["loss"][0]
    provenance = orjson.loads((drafted / "model" / "provenance.json").read_bytes())
    assert provenance["figures"] == best
    assert provenance["settings"]["layers"] == 2


def test_what_is_written_says_what_was_measured(drafted: Path, places: tuple[Path, Path]) -> None:
    """The folder's own weights (bf16) in the trainer's evaluation."""
    target, data = read_frozen(places[0]), read_shards(places[1])
    config = dataclasses.replace(target.config, num_layers=2)
    model = TrainableDraft(config, load_file(drafted / "model" / "model.safetensors"), target.embedding)
    found = Figures.empty(3)
    with torch.no_grad():
        for sequence in sequences(data, held_out=True):
            batch = make_batch(data, [sequence], passes=3, learned=follows(data))
            out = model.forward(batch.tokens[:, : batch.features.shape[1]])[batch.row, batch.at]
            add_figures(found, out.expand(3, -1, -1), batch, Vocabulary.of(target.lm_head, None))
    wanted = orjson.loads((drafted / "model" / "provenance.json").read_bytes())["figures"]["held_out"]
    for name, values in found.report().items():
        assert values == pytest.approx(wanted[name], abs=0.03)


@pytest.mark.parametrize("activations", ["exact", "fast"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_folder_is_the_trained_model(
    drafted: Path, places: tuple[Path, Path], kernels: str, activations: str
) -> None:
    choice = KernelChoice(kernels, activations)  # type: ignore[arg-type]
    target = load_target(places[0], dtype="auto", device=CPU, attention=TorchAttention(), kernels=choice).model
    assert is_borrowing(drafted / "model")
    served = load_borrowing(drafted / "model", target)
    assert served.embedding is target.embedding
    assert served.head is target.head
    frozen = read_frozen(places[0])
    config = dataclasses.replace(frozen.config, num_layers=2)
    trained = TrainableDraft(config, load_file(drafted / "model" / "model.safetensors"), frozen.embedding)
    tokens = torch.arange(5, 25)
    with torch.inference_mode():
        out, _ = served.forward(tokens, make_paged_batch([(20, 20, [0, 1])]), make_kv(served))  # type: ignore[arg-type]
        wanted = trained.forward(tokens[None])[0]
    near = 1e-3 if kernels == "torch" or activations == "exact" else 0.3
    torch.testing.assert_close(out, wanted, rtol=near, atol=near)
    other = TrainableDraft(config, read_layers(places[0], 2), frozen.embedding)
    assert (other.forward(tokens[None])[0] - wanted).abs().max() > 1  # the control: what it began as


@pytest.mark.parametrize("kernels", KERNELS)
async def test_the_folder_drafts_for_the_target(drafted: Path, places: tuple[Path, Path], kernels: str) -> None:
    """`lm:FOLDER` through the real assembly: plain text, and as many drafts kept as the trainer said, about."""
    texts, kept = {}, 0.0
    for draft in ("none", f"lm:{drafted / 'model'}"):
        config = Config(
            model=ModelConfig(path=str(places[0]), max_len=64, threads=1, kernels=kernels, activations="exact"),  # type: ignore[arg-type]
            speculation=SpeculationConfig(draft=draft, draft_len=3, self_check=False),
            scheduler=SchedulerConfig(max_running=4),
        )
        engine = await Engine.create(config)
        try:
            requests = [ask(str(seed), [seed, 7, 9, 30 + seed], max_tokens=24, seed=seed) for seed in range(3, 11)]
            texts[draft] = [(await collect(engine, request))[0].tokens for request in requests]
            stats = engine.stats()
        finally:
            await engine.close()
        if draft != "none":
            kept = sum(stats.accepted_tokens.values()) / sum(stats.drafts.values())
    one, other = texts.values()
    assert one == other
    assert kept > 0.2


def test_a_run_that_is_taken_up_again_is_the_same_bit_for_bit(settings: DraftSettings, tmp_path: Path) -> None:
    settings = changed(settings, accumulate=2)
    whole = train(settings)
    parts = changed(settings, output=tmp_path / "parts")
    for stop in (3, 0):
        figures = train(changed(parts, stop_after=stop))
    assert figures["held_out"] == whole["held_out"]
    one, other = (load_file(s.plan.output / "checkpoint.safetensors") for s in (settings, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ConfigError, match="was made with layers 2, not 1"):
        train(changed(parts, layers=1))


def test_a_package_of_one_layer_is_small(tmp_path: Path) -> None:
    """SmolLM2-135M's sizes: 7 MB, where the embedding alone has 57."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=1, num_heads=9, num_kv_heads=3,
        head_dim=64, max_position=8192, rope=RopeConfig(theta=100000.0), tied=True,
    )  # fmt: skip
    weights = {name: torch.zeros(shape) for name, shape in own_shapes(config).items()}
    before = os.umask(0o027)
    try:
        write_borrowing(tmp_path / "draft", weights, config, target={})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "draft").iterdir()} == {0o640}
    assert sum(path.stat().st_size for path in (tmp_path / "draft").iterdir()) < 8_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0, it must be a whole number above 0"),
        ({"num_layers": 10**12}, "num_layers is 1000000000000; the target has"),  # their names would fill the memory
        ({"num_layers": 3}, "do not match the config; missing: model.layers.2"),
        ({"borrows": ["embedding"]}, r"borrows \['embedding'\]; only 1"),
        ({"target": {"hidden_size": 32}}, "whose hidden_size is 32, not 64"),
        ({"target": None}, "not a draft that borrows from its target"),
    ],
)
def test_damaged_folders_are_refused(
    drafted: Path, places: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    target = load_target(places[0], dtype="auto", device=CPU, attention=TorchAttention(), kernels=TORCH).model
    data = orjson.loads((drafted / "model" / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((drafted / "model" / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes(orjson.dumps(data))
    assert load_borrowing(tmp_path, target).shape.num_layers == 2
    tensors = load_file(tmp_path / "model.safetensors")
    for norm, reason in (
        (torch.ones(64, dtype=torch.int8), "is of torch.int8"),
        (torch.full((64,), torch.nan), "finite"),
    ):
        save_file(tensors | {"model.norm.weight": norm}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=f"model.norm.weight .*{reason}"):
            load_borrowing(tmp_path, target)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(orjson.dumps(data | change))
    with pytest.raises(ModelError, match=message):
        load_borrowing(tmp_path, target)


def test_the_command(settings: DraftSettings, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "train",
        "draft",
        str(settings.model),
        "--shards",
        str(settings.shards[0]),
        "-o",
        str(settings.plan.output),
    ]
    assert main([*words, "--layers", "6"]) == 78
    assert "--layers 6: model has 6; give fewer" in capsys.readouterr().err
    assert main([*words, "--layers", "0"]) == 2
    assert "--layers 0: must be at least 1" in capsys.readouterr().err
    assert main([*words, "--layers", "1", "--stop-after", "2", "--precision", "bf16"]) == 0
    assert "drafts kept of 3" in capsys.readouterr().out
    assert is_borrowing(settings.plan.output / "model")
