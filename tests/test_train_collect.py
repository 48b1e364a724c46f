"""Corpora and shards: what `specd train collect` reads and writes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specd.attention.torch_attention import TorchAttention
from specd.errors import ConfigError
from specd.models.registry import load_target
from specd.train.collect import CollectSettings, Features, collect, grouped
from specd.train.corpus import SHIPPED, Text, corpus_file, join, read_corpus
from specd.train.shards import read_origin, read_shards
from tests.tiny import CPU, make_batch, make_kv
from tests.training import TORCH, random_texts, tiny_shards, write_corpus


@pytest.mark.parametrize(
    ("name", "chats", "tokens", "answers"),
    [("chats", 2131, 739454, 619007), ("self-prompted", 1800, 724024, 517645)],
)
def test_shipped_corpora_are_what_their_readme_says(name: str, chats: int, tokens: int, answers: int) -> None:
    path = corpus_file(Path(name))
    texts = read_corpus(path)
    role = np.concatenate([text.role for text in texts])
    assert (len(texts), len(role), int((role == 2).sum())) == (chats, tokens, answers)
    assert [i for i, text in enumerate(texts) if text.held_out] == list(range(0, chats, 20))
    assert path.stat().st_size < 3_000_000
    assert corpus_file(None) == SHIPPED["chats"]
    assert corpus_file(Path("else.safetensors")) == Path("else.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lens": torch.tensor([3, 4], dtype=torch.int32)}, "8 ids, 8 roles and lens that sum to 7"),
        ({"held_out": torch.tensor([1], dtype=torch.uint8)}, "1 held_out marks for 2 sequences"),
        ({"role": None}, "no tensor 'role'"),
        ({"ids": torch.zeros(2, 4, dtype=torch.int32)}, r"ids is \[2, 4\] of torch.int32"),
        ({"ids": torch.tensor(3)}, r"ids is \[\] of torch.int64"),
        ({"ids": torch.rand(8)}, r"ids is \[8\] of torch.float32"),
        ({"ids": torch.arange(8) - 1}, "ids holds -1"),
        ({"lens": torch.tensor([2**33, 8 - 2**33])}, "lens holds 8589934592"),
        ({"role": torch.full((8,), 4)}, "has role 4; 0 to 3 exist"),
        ({"held_out": torch.ones(2, 2, dtype=torch.uint8)}, r"held_out is \[2, 2\]"),
        ({"held_out": torch.ones(2, dtype=torch.bfloat16)}, "held_out is .* of torch.bfloat16"),
        ({name: torch.zeros(0, dtype=torch.int32) for name in ("ids", "role", "lens")}, "holds no sequence"),
    ],
)
def test_damaged_corpus_is_refused(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors: dict[str, torch.Tensor | None] = {
        "ids": torch.arange(8, dtype=torch.int32),
        "role": torch.zeros(8, dtype=torch.uint8),
        "lens": torch.tensor([4, 4], dtype=torch.int32),
    }
    kept = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    path = tmp_path / "corpus.safetensors"
    save_file(kept, path)
    with pytest.raises(ConfigError, match=message):
        read_corpus(path)


def chat(*words: int, held_out: bool = False, ended: bool = True) -> Text:
    """<1 9 2 5> is the header, 1 opens a turn, 2 ends one, 5 stands between."""
    ids = [1, 9, 2, 5, 1, 8, *words, *([2] if ended else [])]
    role = [0] * 6 + [2] * (len(ids) - 6)
    return Text(np.asarray(ids, np.int32), np.asarray(role, np.uint8), held_out)


def test_join_makes_a_fifth_long_and_repeats_no_header(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [chat(20 + i, 30 + i, held_out=i % 7 == 0, ended=i % 5 != 0) for i in range(200)]
    joined = join(texts, 30, (2,))
    long = [text for text in joined if len(text.ids) > 10]
    share = sum(len(text.ids) for text in long) / sum(len(text.ids) for text in joined)
    assert 0.1 < share < 0.25
    assert all(len(text.ids) <= 30 and not text.held_out for text in long)
    assert [int((text.ids == 9).sum()) for text in long] == [1] * len(long)
    first = long[0].ids.tolist()
    assert first[8:12] == [2, 5, 1, 8]  # end of an answer, what stands between, the next turn
    answers = lambda texts: sorted(int(i) for text in texts for i in text.ids[text.role == 2])
    assert answers(joined) == answers(texts)
    held_out = lambda texts: [text.ids.tolist() for text in texts if text.held_out]
    assert held_out(joined) == held_out(texts)
    size, total = (sum(len(text.ids) for text in each) for each in (long, joined))
    assert capsys.readouterr().err == f"{size} of {total} tokens are in joined chats\n"


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ([chat(20, ended=False) for _ in range(200)], "0 of 200 sequences can be: .* do not end with an end token"),
        ([chat(20) for _ in range(8)], r"too small: .* 120 tokens pass alone before .* and there are \d+ to train on"),
        ([chat(*range(20, 60)) for _ in range(50)], r"too long: .* at most 30 tokens .* 50 chats have \d+ or more"),
    ],
)
def test_where_nothing_can_be_joined_join_is_refused(texts: list[Text], why: str) -> None:
    with pytest.raises(ConfigError, match=f"--join 30: no two chats could be joined: .*{why}"):
        join(texts, 30, (2,))


def test_grouped_keeps_order_and_limits() -> None:
    texts = random_texts(20, vocab_size=50)
    groups = list(grouped(texts, 40))
    assert [t for group in groups for t in group] == texts
    assert all(sum(len(t.ids) for t in group) <= 40 for group in groups)
    assert len(groups) > 5


@pytest.mark.parametrize("features", ["last", "pre", "aux"])
def test_shards_hold_what_the_target_computes(tmp_path: Path, features: Features) -> None:
    texts = random_texts(12, vocab_size=97)
    model, shards = tiny_shards(tmp_path, texts, features=features, shard_tokens=60)
    data = read_shards(shards)
    assert data.origin.num_shards == len(list(shards.iterdir())) > 2
    assert data.ids.tolist() == [int(i) for text in texts for i in text.ids]
    assert data.held_out.tolist() == [text.held_out for text in texts]
    assert data.written.tolist() == [bool(r) for text in texts for r in text.role]
    target = load_target(model, dtype="auto", device=CPU, attention=TorchAttention(), kernels=TORCH).model
    for index in (0, 5, 11):
        ids = torch.from_numpy(texts[index].ids).long()
        with torch.inference_mode():
            batch = make_batch([(len(ids), len(ids), [0, 1])])
            hidden, read = target.forward(ids, batch, make_kv(target), features=features)
            best = target.logits(hidden).argmax(-1)
        rows = slice(int(data.starts[index]), int(data.starts[index] + data.lens[index]))
        assert read is not None
        torch.testing.assert_close(data.hidden[rows].float(), hidden, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(data.features[rows].float(), read, rtol=1e-2, atol=1e-2)
        assert data.best[rows].tolist() == best.tolist()


def test_collect_goes_on_where_it_stopped(tmp_path: Path) -> None:
    texts = random_texts(12, vocab_size=97)
    model, shards = tiny_shards(tmp_path, texts, shard_tokens=60)
    whole = {path.name: load_file(path) for path in shards.iterdir()}
    lost = shards / "shard-00001.safetensors"
    lost.unlink()
    (shards / "shard-00001.partial").write_bytes(b"half")
    with pytest.raises(ConfigError, match=f"has {len(whole) - 1} of {len(whole)} shards"):
        read_shards(shards)
    kept = shards / "shard-00000.safetensors"
    written = kept.stat().st_mtime_ns
    settings = CollectSettings(
        model, tmp_path / "corpus.safetensors", shards, shard_tokens=60, batch_tokens=100, kernels=TORCH
    )
    collect(settings)
    again = {path.name: load_file(path) for path in shards.iterdir()}
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[file][name], tensor) for file in whole for name, tensor in whole[file].items())
    assert kept.stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="is of another run"):
        collect(dataclasses.replace(settings, features="aux"))


def test_tokens_that_the_target_does_not_have_are_refused(tmp_path: Path) -> None:
    texts = random_texts(4, vocab_size=97)
    model, _ = tiny_shards(tmp_path, texts)
    corpus = write_corpus(tmp_path / "other.safetensors", [chat(97), *texts])
    settings = CollectSettings(model, corpus, tmp_path / "new", kernels=TORCH)
    with pytest.raises(ConfigError, match=r"holds token 97; .* has 97 tokens"):
        collect(settings)
    assert not (tmp_path / "new").exists()


def test_shards_of_two_runs_do_not_mix(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        tiny_shards(tmp_path / name, random_texts(12, vocab_size=97, seed=seed), shard_tokens=60)
    name = "shard-00001.safetensors"
    (tmp_path / "b" / "shards" / name).replace(tmp_path / "a" / "shards" / name)
    with pytest.raises(ConfigError, match="of another run"):
        read_shards(tmp_path / "a" / "shards")
    assert "input_ids" in load_file(tmp_path / "a" / "shards" / name)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_shards(tmp_path_factory.mktemp("shards"), random_texts(12, vocab_size=97), shard_tokens=80)[1]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("best", lambda tensor: None, "holds held_out, hidden, input_ids, lens, loss_mask; a shard has best"),
        ("lens", lambda tensor: tensor + 1, "lens that sum to"),
        ("lens", lambda tensor: tensor[:-1], r"held_out is \[\d+\] beside lens"),
        (
            "lens",
            lambda tensor: torch.cat([tensor[:1] + tensor[-1:] + 1, tensor[1:-1], -tensor[:1] * 0 - 1]),
            "below 1",
        ),
        ("best", lambda tensor: tensor[:-1], r"best is \[\d+\] beside input_ids"),
        ("input_ids", lambda tensor: tensor - 97, "input_ids has tokens below 0"),
        ("input_ids", lambda tensor: tensor.float(), "input_ids is of torch.float32"),
        ("hidden", lambda tensor: tensor[:, 1:].contiguous(), r"hidden has rows of \[63\]"),
        ("hidden", lambda tensor: tensor * float("nan"), "hidden has values that are not finite"),
    ],
)
def test_a_shard_that_is_not_whole_is_named(
    shards: Path, tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str
) -> None:
    folder = shutil.copytree(shards, tmp_path / "shards")
    path = sorted(folder.iterdir())[-1]
    tensors: dict[str, torch.Tensor | None] = dict(load_file(path))
    tensors[name] = change(load_file(path)[name])
    save_file({k: v for k, v in tensors.items() if v is not None}, path, metadata=read_origin(path).metadata())
    with pytest.raises(ConfigError, match=f"{path.name}: .*{message}"):
        read_shards(folder)


def test_a_shard_of_many_is_named(shards: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shards, tmp_path / "shards")
    for path in folder.iterdir():
        save_file(load_file(path), path, metadata=read_origin(path).metadata() | {"num_shards": "many"})
    with pytest.raises(ConfigError, match="num_shards is 'many'"):
        read_shards(folder)
