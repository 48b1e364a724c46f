"""`specd train validate`: the parts that serve say what the trainer said; its groups and its further figures."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from specd.attention.torch_attention import TorchAttention
from specd.cli import main
from specd.errors import ConfigError
from specd.models.heads import read_head
from specd.models.llama import Llama
from specd.models.registry import KernelChoice, load_target
from specd.train.batches import evenly, follows, make_batch, sequences
from specd.train.corpus import Text
from specd.train.head import TrainableHead
from specd.train.held_out import read_held_out
from specd.train.mtp import MtpSettings, train
from specd.train.plan import Plan
from specd.train.replay import Replay, Table
from specd.train.run import Figures, Vocabulary, add_figures, run_passes
from specd.train.shards import Collected, read_shards
from specd.train.target import read_frozen
from specd.train.validate import ValidateSettings, by_context, figures, validate
from tests.native import needs_kernels
from tests.tiny import CPU, greedy, make_kv, tiny_config, tiny_llama, tiny_weights
from tests.tiny import make_batch as make_paged_batch
from tests.training import TORCH, nearly_bigram, tiny_shards

DEPTH = 4
KERNELS = [pytest.param("torch", id="torch"), pytest.param("native", id="native", marks=needs_kernels)]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A target, shards of sequences longer than a chunk, and a head that is often right and often wrong."""
    folder = tmp_path_factory.mktemp("validate")
    model, shards = tiny_shards(folder, spoken_texts(), shard_tokens=1024)
    settings = MtpSettings(
        model,
        (shards,),
        Plan(folder / "run", epochs=8, batch_tokens=512, lr=3e-3, warmup=4, eval_every=1000, eval_steps=DEPTH),
        draft_vocab=80,
        steps=2,
    )
    train(settings)
    return model, shards, folder / "run" / "head"


def spoken_texts() -> list[Text]:
    """Mostly the target's own greedy words, or chains of drafts would end at once; with gaps that it did not write."""
    config = tiny_config(num_layers=6)
    target = tiny_llama(config=config, weights=nearly_bigram(tiny_weights(config)))
    generator = np.random.default_rng(3)
    texts = []
    for index in range(72):
        ids = generator.integers(0, 97, 3).tolist()
        for _ in range(int(generator.integers(2, 8))):
            ids += greedy(target, ids, 6) + generator.integers(0, 97, 1).tolist()
        role = np.where((np.arange(len(ids)) < 3) | (np.arange(len(ids)) % 29 > 25), 0, 2)
        texts.append(Text(np.asarray(ids, np.int32), role.astype(np.uint8), index % 3 == 0))
    return texts


def exact(kernels: str) -> KernelChoice:
    return KernelChoice("native", "exact") if kernels == "native" else TORCH


def trainer_figures(places: tuple[Path, Path, Path]) -> dict[str, list[float]]:
    """The trainer's evaluation of the head that was written, on the target's states as they are, not in bf16."""
    model, shards, head = places
    data, target, file = in_full(read_shards(shards), model), read_frozen(model), read_head(head)
    trained = TrainableHead(file.config, file.weights, target.embedding)
    vocabulary = Vocabulary.of(target.lm_head, file.token_ids)
    found = Figures.empty(DEPTH)
    with torch.no_grad():
        for sequence in sequences(data, held_out=True):
            batch = make_batch(data, [sequence], passes=DEPTH, learned=follows(data))
            add_figures(found, run_passes(trained, batch, passes=DEPTH), batch, vocabulary)
    return found.report()


def in_full(data: Collected, model: Path) -> Collected:
    """With states in f32."""
    target = load_target(model, dtype="auto", device=CPU, attention=TorchAttention(), kernels=TORCH).model
    assert isinstance(target, Llama)
    states = []
    with torch.inference_mode():
        for start, size in zip(data.starts.tolist(), data.lens.tolist(), strict=True):
            batch = make_paged_batch([(size, size, list(range(8)))])
            states.append(target.forward(data.ids[start : start + size], batch, make_kv(target, num_pages=8))[0])
        hidden = torch.cat(states)
        best = target.best(hidden).tokens
    return dataclasses.replace(data, hidden=hidden.clone(), features=hidden.clone(), best=best.clone())


def settings_of(places: tuple[Path, Path, Path], kernels: KernelChoice, **changes: Any) -> ValidateSettings:
    model, shards, head = places
    return ValidateSettings(model, head, (shards,), kernels=kernels, **({"tokens": 10**6, "depth": DEPTH} | changes))


def assert_close(found: dict[str, Any], wanted: dict[str, list[float]], tolerance: float) -> None:
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, abs=tolerance), name


@pytest.mark.parametrize("chunk_tokens", [11, 256])
@pytest.mark.parametrize("kernels", KERNELS)
def test_what_serves_says_what_the_trainer_said(
    places: tuple[Path, Path, Path], kernels: str, chunk_tokens: int
) -> None:
    report = validate(settings_of(places, exact(kernels), chunk_tokens=chunk_tokens))
    wanted = trainer_figures(places)
    assert_close(report["served"], wanted, 2e-4)
    assert 0.2 < min(wanted["top1"]) < max(wanted["top1"]) < 0.95
    # What the run itself wrote down was measured on states in bf16.
    assert_close(report["difference"], {name: [0.0] * DEPTH for name in wanted}, 0.01)
    assert report["trained"] != {name: report["served"][name] for name in wanted}


@needs_kernels
def test_fast_kernels_are_near(places: tuple[Path, Path, Path]) -> None:
    served = validate(settings_of(places, KernelChoice("native", "fast")))["served"]
    wanted = trainer_figures(places)
    assert_close(served, wanted, 0.05)
    assert served["loss"] != pytest.approx(wanted["loss"], abs=2e-4)


def test_chains_that_shared_their_last_page_would_be_seen(
    places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the pages' copies the context of most chains is junk from slot i + 1's page on."""
    monkeypatch.setattr(Replay, "_copy_pages", lambda self, pairs: None)
    served = validate(settings_of(places, TORCH))["served"]
    wanted = trainer_figures(places)
    assert served["overlap"][0] == pytest.approx(wanted["overlap"][0], abs=2e-4)
    assert served["overlap"][1] != pytest.approx(wanted["overlap"][1], abs=2e-3)


def random_table(columns: int, seed: int = 0) -> Table:
    generator = torch.Generator().manual_seed(seed)
    flags = [torch.rand(3, columns, generator=generator) < 0.7 for _ in range(3)]
    sums = [torch.rand(3, columns, generator=generator, dtype=torch.float64) for _ in range(3)]
    return Table(flags[0], sums[0], sums[1], flags[1], flags[2], sums[2])


def test_figures_are_those_of_a_loop_over_chains() -> None:
    tables = [random_table(40), random_table(25, seed=1)]
    found = figures(tables)
    for j in range(3):
        reached, agreed, weights, kept = 0, 0, 0.0, 0.0
        for table in tables:
            for i in range(table.valid.shape[1]):
                if not table.valid[j, i]:
                    continue
                reached += all(table.valid[e, i] & table.agreed[e, i] & table.right[e, i] for e in range(j))
                agreed += all(table.valid[e, i] & table.agreed[e, i] & table.right[e, i] for e in range(j)) and bool(
                    table.agreed[j, i]
                )
                weight = float(torch.prod(table.kept[:j, i] * table.valid[:j, i]))
                weights, kept = weights + weight, kept + weight * float(table.overlap[j, i])
        assert found["top1"][j] == pytest.approx(agreed / reached, abs=1e-4)
        assert found["sampled"][j] == pytest.approx(kept / weights, abs=1e-4)
    first, second, third = found["sampled"]
    assert found["kept_sampled"] == pytest.approx(first + first * second + first * second * third, abs=2e-4)
    assert found["rows"] == [int(sum(t.valid[j].sum() for t in tables)) for j in range(3)]


def test_sampled_acceptance_is_that_of_verified_drafts() -> None:
    """Two drafts under the ratio rule, played many times, against the weighted figure from text that p wrote."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(5, 5, generator=generator, dtype=torch.float64) ** 3 for _ in range(2))  # after each token
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    draw = lambda rows: torch.multinomial(rows, 1, generator=generator)[:, 0]
    start = torch.zeros(200_000, dtype=torch.int64)
    one = draw(q[start])
    kept = torch.rand(len(one), generator=generator) < p[start, one] / q[start, one]
    two = draw(q[one])
    again = torch.rand(len(one), generator=generator) < p[one, two] / q[one, two]
    wanted = [float(kept.double().mean()), float((kept & again).double().sum() / kept.sum())]
    text = draw(p[start])  # the target's own
    overlap = torch.stack([torch.minimum(p, q).sum(-1)[place] for place in (start, text)])
    ratio = torch.stack([(q / p)[start, text], torch.ones(len(text), dtype=torch.float64)]).clamp(max=1)
    flags = torch.ones(2, len(text), dtype=torch.bool)
    found = figures([Table(flags, overlap, overlap, flags, flags, ratio)])
    assert found["sampled"] == pytest.approx(wanted, abs=0.01)
    assert abs(found["sampled"][1] - found["overlap"][1]) > 0.02  # the control: the plain mean is another number


def test_groups_add_up_to_the_whole(places: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, _, head = places
    tensors = load_file(model.parent / "corpus.safetensors")
    tensors["temperature"] = torch.tensor([(0.0, 0.7)[i % 2] for i in range(len(tensors["lens"]))])
    corpus = tmp_path / "corpus.safetensors"
    save_file(tensors, corpus)
    settings = ValidateSettings(model, head, corpus=corpus, tokens=10**6, depth=2, kernels=TORCH)
    report = validate(settings)
    plain = validate(settings_of(places, TORCH, depth=2))
    assert report["served"] == plain["served"]
    assert "by_temperature" not in plain
    groups = report["by_temperature"]
    assert list(groups) == ["0", "0.7"]
    assert [sum(g["rows"][j] for g in groups.values()) for j in range(2)] == report["served"]["rows"]
    assert groups["0"]["loss"] != groups["0.7"]["loss"]
    save_file(tensors | {"temperature": tensors["temperature"][1:].clone()}, corpus)
    with pytest.raises(ConfigError, match=r"temperature is \[71\], for 72 sequences"):
        validate(settings)


def test_contexts_are_those_that_stand_when_a_draft_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specd.train.validate._CONTEXTS", (8, 16))
    table = random_table(40)
    groups = by_context([table])
    assert list(groups) == ["8", "16", "over 16"]
    for name, columns in (("8", range(7)), ("16", range(7, 15)), ("over 16", range(15, 40))):
        assert all(
            low <= i + 2 <= high for low, high in [{"8": (2, 8), "16": (9, 16)}.get(name, (17, 99))] for i in columns
        )
        assert groups[name]["rows"] == table.valid[:, list(columns)].sum(1).tolist()


def test_the_same_sequences_as_the_trainers(places: tuple[Path, Path, Path]) -> None:
    data = read_shards(places[1])
    chosen = evenly(sequences(data, held_out=True), data.lens, 400)
    texts = read_held_out(shards=(places[1],), corpus=None, num_tokens=400)
    assert [text.ids.tolist() for text in texts] == [
        data.ids[int(data.starts[s]) : int(data.starts[s] + data.lens[s])].tolist() for s in chosen
    ]
    assert 300 < sum(len(text.ids) for text in texts) < 500
    same = read_held_out(shards=(), corpus=places[0].parent / "corpus.safetensors", num_tokens=400)
    for one, other in zip(texts, same, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.learned, other.learned)


def test_the_command(places: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, shards, head = places
    words = ["train", "validate", str(model), "--shards", str(shards), "--kernels", "torch", "--tokens", "500"]
    assert main([*words, "--head", str(head), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["difference"]["top1"]) == 3
    bare = tmp_path / "bare"
    shutil.copytree(head, bare)
    (bare / "provenance.json").unlink()
    assert main([*words, "--head", str(bare)]) == 0
    out = capsys.readouterr().out
    assert "nothing to compare with" in out
    assert "kept greedy" in out
    (bare / "provenance.json").write_bytes(orjson.dumps({"figures": {}}))
    assert main([*words, "--head", str(bare)]) == 78
    assert "has no figures.held_out" in capsys.readouterr().err
    assert main([*words, "--head", str(head), "--depth", "65"]) == 78
    assert "--depth 65: mtp:head drafts at most 64 tokens" in capsys.readouterr().err
    assert main([*words, "--head", str(head), "--depth", "0"]) == 2
    assert "--depth 0: must be at least 1" in capsys.readouterr().err
