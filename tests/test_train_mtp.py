"""Training runs on tiny targets: batches, figures, resuming, and that a head learns."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file

from specd.cli import main
from specd.errors import ConfigError
from specd.models.heads import read_head
from specd.train.batches import draft_vocabulary, epoch_batches, follows, make_batch, sequences
from specd.train.checkpoint import read_state, save_checkpoint
from specd.train.folder import RunFolder
from specd.train.head import HeadInputs, TrainableHead, balance, initial_weights
from specd.train.mtp import MtpSettings, head_config, train
from specd.train.plan import Plan
from specd.train.run import Figures, Vocabulary, add_figures, run_passes
from specd.train.shards import Collected, read_shards
from specd.train.target import read_frozen
from tests.training import changed, random_texts, tiny_shards


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    texts = random_texts(160, vocab_size=97, longest=40)
    return tiny_shards(tmp_path_factory.mktemp("training"), texts, shard_tokens=1024)


@pytest.fixture
def settings(places: tuple[Path, Path], tmp_path: Path) -> MtpSettings:
    return MtpSettings(
        places[0],
        (places[1],),
        Plan(tmp_path / "run", epochs=2, batch_tokens=256, warmup=4, lr=2e-3, eval_every=5),
        draft_vocab=60,
        steps=2,
    )


@pytest.fixture
def data(places: tuple[Path, Path]) -> Collected:
    return read_shards(places[1])


def test_an_epoch_is_every_sequence_once_and_another_order_each_time(data: Collected) -> None:
    chosen = sequences(data, held_out=False)
    assert not set(chosen) & set(sequences(data, held_out=True))
    first, again, second = (epoch_batches(data, chosen, 256, seed=0, epoch=epoch) for epoch in (0, 0, 1))
    assert first == again != second
    for batches in (first, second):
        assert sorted(s for batch in batches for s in batch) == chosen
        assert all(int(data.lens[batch].max()) * len(batch) <= 256 for batch in batches)
    padded = sum(int(data.lens[batch].max()) * len(batch) for batch in first)
    assert padded < 1.25 * int(data.lens[chosen].sum())


def test_a_batch_learns_the_written_tokens_alone(data: Collected) -> None:
    chosen = sequences(data, held_out=False)[:5]
    batch = make_batch(data, chosen, passes=3, learned=follows(data))
    wanted = []
    for row, sequence in enumerate(chosen):
        start, size = int(data.starts[sequence]), int(data.lens[sequence])
        wanted += [(row, at) for at in range(1, size - 1) if data.written[start + at + 1]]
    assert list(zip(batch.row.tolist(), batch.at.tolist(), strict=True)) == wanted
    for index, (row, at) in enumerate(wanted):
        place = int(data.starts[chosen[row]]) + at
        assert batch.following[index] == data.ids[place + 1] == batch.tokens[row, at + 1]
        assert batch.best[index] == data.best[place]
        assert torch.equal(batch.teacher[index], data.hidden[place].float())
        assert batch.valid[:, index].tolist() == [at >= 1, at >= 2, at >= 3]


def test_a_part_of_the_corpus_is_trained_on_and_all_of_the_held_out_looked_at(settings: MtpSettings) -> None:
    figures = train(changed(settings, train_tokens=300, epochs=1))
    whole = train(changed(settings, output=settings.plan.output.with_name("whole"), epochs=1))
    logs = [(path / "log.jsonl").read_bytes().splitlines() for path in settings.plan.output.parent.iterdir()]
    first, second = (orjson.loads(lines[0])["held_out"] for lines in logs)
    assert first == second  # of the same start
    assert 1 <= figures["step"] <= 2 < whole["step"]


def test_draft_vocabulary_is_the_most_frequent_of_what_is_trained_on(data: Collected) -> None:
    ids, coverage = draft_vocabulary(data, 60, 97)
    counts = [0] * 97
    for sequence in sequences(data, held_out=False):
        start, size = int(data.starts[sequence]), int(data.lens[sequence])
        for at in range(size - 1):
            if data.written[start + at + 1]:
                counts[int(data.best[start + at])] += 1
                counts[int(data.ids[start + at + 1])] += 1
    assert ids.tolist() == sorted(ids.tolist())
    assert min(counts[i] for i in ids.tolist()) >= max(c for i, c in enumerate(counts) if i not in ids.tolist())
    assert coverage == pytest.approx(sum(counts[i] for i in ids.tolist()) / sum(counts))


def test_figures_are_those_of_a_loop_over_origins(settings: MtpSettings, data: Collected) -> None:
    target = read_frozen(settings.model)
    token_ids, _ = draft_vocabulary(data, 90, 97)
    vocabulary = Vocabulary.of(target.lm_head, token_ids)
    config = head_config(settings, target, "last")
    chosen = sequences(data, held_out=True)[:6]
    batch = make_batch(data, chosen, passes=3, learned=follows(data))
    usual = torch.arange(len(batch.at)) % 7 > 0
    batch.following[usual] = batch.best[usual]  # random text hardly ever takes the target's argmax
    sample = HeadInputs(batch.tokens[:, 1 : 1 + batch.features.shape[1]], batch.features, target.embedding)
    head = TrainableHead(config, balance(config, initial_weights(config, target, 0), sample), target.embedding)
    with torch.no_grad():
        out = run_passes(head, batch, passes=3)
        usual = torch.arange(len(batch.at)) % 5 > 0
        out[:, usual] = batch.teacher[usual]  # a head that is mostly right, so that chains go on
        figures = Figures.empty(3)
        add_figures(figures, out, batch, vocabulary)
        p, q = ((x @ target.lm_head.T).softmax(-1) for x in (batch.teacher, out))
        q = torch.zeros_like(q).index_copy_(-1, token_ids, (out @ vocabulary.rows.T).softmax(-1))
    place = {(int(r), int(a)): i for i, (r, a) in enumerate(zip(batch.row, batch.at, strict=True))}
    reached, agreed = [0, 0, 0], [0, 0, 0]
    for (row, at), index in place.items():
        for j in range(3):
            chain = [place.get((row, at - j + earlier)) for earlier in range(j)]
            if not batch.valid[j, index] or any(
                i is None or q[e, i].argmax() != batch.best[i] or batch.best[i] != batch.following[i]
                for e, i in enumerate(chain)
            ):
                continue
            reached[j] += 1
            agreed[j] += int(q[j, index].argmax() == batch.best[index])
    assert figures.reached.tolist() == reached
    assert figures.agreed.tolist() == agreed
    assert 0 < agreed[2] < reached[2]
    overlap = (torch.minimum(p, q).sum(-1) * batch.valid).sum(-1) / batch.valid.sum(-1)
    assert figures.report()["overlap"] == pytest.approx(overlap.tolist(), abs=1e-3)


def test_a_run_that_is_taken_up_again_is_the_same_bit_for_bit(settings: MtpSettings, tmp_path: Path) -> None:
    settings = changed(settings, noise=0.1, accumulate=2, feature_weight=0.1)
    whole = train(settings)
    parts = changed(settings, output=tmp_path / "parts")
    for stop in (5, 9, 0):  # 9: an evaluation of its own, not one of every fifth step
        figures = train(changed(parts, stop_after=stop))
    assert figures["held_out"] == whole["held_out"]
    one, other = (load_file(s.plan.output / "checkpoint.safetensors") for s in (settings, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    seeded = load_file(train_other(parts, tmp_path) / "checkpoint.safetensors")
    assert not torch.equal(seeded["weight.eh_proj.weight"], one["weight.eh_proj.weight"])


def train_other(settings: MtpSettings, tmp_path: Path) -> Path:
    """The control: another seed gives other weights."""
    other = changed(settings, seed=1, output=tmp_path / "other")
    train(other)
    return other.plan.output


def test_a_checkpoint_of_other_settings_is_refused(settings: MtpSettings) -> None:
    train(changed(settings, stop_after=1))
    with pytest.raises(ConfigError, match=r"was made with lr 0\.002, not 0\.001"):
        train(changed(settings, lr=1e-3))
    with pytest.raises(ConfigError, match="was made with eval_steps 3, not 2"):  # drafts kept of 3 and of 2
        train(changed(settings, eval_steps=2))
    with pytest.raises(ConfigError, match="was made with eval_tokens 16384, not 100"):
        train(changed(settings, eval_tokens=100))


def test_a_checkpoint_that_is_older_than_an_option_goes_on(settings: MtpSettings) -> None:
    train(changed(settings, stop_after=1))
    path = settings.plan.output / "checkpoint.safetensors"
    state = read_state(path)
    assert {"lr", "draft_vocab", "precision"} <= state["identity"].keys()  # in one row
    known = {name: v for name, v in state["identity"].items() if name not in ("train_tokens", "without", "eval_steps")}
    save_checkpoint(path, load_file(path), state | {"identity": known})
    with pytest.raises(ConfigError, match="was made with train_tokens 0, not 300"):
        train(changed(settings, train_tokens=300))
    with pytest.raises(ConfigError, match=r"was made with without \[\], not \['input_norm'\]"):
        train(changed(settings, without=("input_norm",)))
    assert train(changed(settings, stop_after=2))["step"] == 2


def test_a_crash_between_two_heads_loses_neither(settings: MtpSettings) -> None:
    train(changed(settings, stop_after=1))
    head = settings.plan.output / "head"
    written = (head / "model.safetensors").read_bytes()
    head.rename(settings.plan.output / "head.old")
    RunFolder(settings.plan.output, best="head", writes=False)
    assert not head.exists()  # another rank's business
    RunFolder(settings.plan.output, best="head", writes=True)
    assert (head / "model.safetensors").read_bytes() == written
    assert not (settings.plan.output / "head.old").exists()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_what_is_written_has_the_mode_of_any_new_file(settings: MtpSettings, umask: int) -> None:
    before = os.umask(umask)
    try:
        train(changed(settings, stop_after=1))
    finally:
        os.umask(before)
    files = [path for path in settings.plan.output.rglob("*") if path.is_file()]
    assert {"log.jsonl", "checkpoint.safetensors", "model.safetensors", "config.json"} <= {path.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}


def test_accumulated_batches_are_one_large_batch(settings: MtpSettings, data: Collected, tmp_path: Path) -> None:
    # As many forwards as an epoch has: the same sequences in one step, however they are cut.
    weights = []
    for name, tokens in (("large", 2000), ("small", 300)):
        each = changed(
            settings, batch_tokens=tokens, accumulate=1000, stop_after=1, warmup=0, epochs=1, output=tmp_path / name
        )
        chosen = sequences(data, held_out=False)
        assert (len(epoch_batches(data, chosen, tokens, seed=0, epoch=0)) > 8) == (name == "small")
        train(each)
        line = (each.plan.output / "log.jsonl").read_bytes().splitlines()[1]
        weights.append((orjson.loads(line)["loss"], load_file(each.plan.output / "checkpoint.safetensors")))
    assert weights[0][0] == pytest.approx(weights[1][0], rel=1e-4)
    moments = [w["first.eh_proj.weight"] for _, w in weights]
    torch.testing.assert_close(moments[0], moments[1], rtol=1e-3, atol=1e-6)


def test_a_head_learns_far_more_than_chance(settings: MtpSettings) -> None:
    figures = train(changed(settings, draft_vocab=0, epochs=40, steps=1, eval_every=50, lr=3e-3))
    learned = figures["held_out"]["top1"][0]
    assert learned > 0.5
    head = read_head(settings.plan.output / "head")
    assert head.target["name"] == "model"
    provenance = orjson.loads((settings.plan.output / "head" / "provenance.json").read_bytes())
    assert provenance["figures"] == figures
    first = orjson.loads((settings.plan.output / "log.jsonl").read_bytes().splitlines()[0])
    assert first["held_out"]["top1"][0] < learned / 3  # the control: what it started with; chance is a hundredth


def test_a_run_can_begin_with_a_head(settings: MtpSettings, tmp_path: Path) -> None:
    train(settings)
    head, output = settings.plan.output / "head", tmp_path / "more"
    again = changed(settings, init=head, output=output, stop_after=1, lr=1e-9, warmup=0, draft_vocab=50)
    train(again)
    before, after = read_head(head), read_head(output / "head")
    assert (before.config.draft_vocab_size, after.config.draft_vocab_size) == (60, 50)
    for name, weight in before.weights.items():
        torch.testing.assert_close(after.weights[name], weight, rtol=1e-2, atol=1e-5)
    with pytest.raises(ConfigError, match=r"its feedback is 'post_norm', this run's would be 'pre_norm'"):
        train(changed(again, feedback="pre_norm", output=tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"was made with init .*run/head"):
        train(changed(again, init=None))


def test_shards_of_several_folders_are_one_corpus(settings: MtpSettings, tmp_path: Path) -> None:
    texts = random_texts(40, vocab_size=97, longest=40, seed=5)
    model, more = tiny_shards(tmp_path, texts, shard_tokens=1024)
    first, second = read_shards(settings.shards[0]), read_shards(more)
    both = read_shards(settings.shards[0], more)
    assert len(both.lens) == len(first.lens) + len(second.lens)
    assert torch.equal(both.ids, torch.cat([first.ids, second.ids]))
    assert torch.equal(both.held_out, torch.cat([first.held_out, second.held_out]))
    assert len({both.fingerprint, first.fingerprint, second.fingerprint}) == 3
    train(changed(settings, model=model, shards=(*settings.shards, more), stop_after=1))
    with pytest.raises(ConfigError, match="the same text would be learned twice"):
        read_shards(more, more)
    _, other = tiny_shards(_folder(tmp_path / "pre"), texts, features="pre", shard_tokens=1024)
    with pytest.raises(ConfigError, match="was not collected like"):
        read_shards(more, other)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_shards_of_another_target_are_refused(settings: MtpSettings, tmp_path: Path) -> None:
    other, _ = tiny_shards(tmp_path, random_texts(4, vocab_size=97, seed=3))
    (other / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes() + b" ")
    with pytest.raises(ConfigError, match="were collected from model, not from"):
        train(changed(settings, model=other))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "0"], "--lr 0.0: must be above 0"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--noise", "inf"], "--noise inf: must be at least 0, and finite"),
        (["--clip", "inf"], "--clip inf: must be above 0, and finite"),
        (["--seed", "10000000000000000"], "--seed 10000000000000000: must be at most"),
        (["-o", "/dev/null/run"], "--output /dev/null/run: cannot be made"),
        (["--draft-vocab", "98"], "--draft-vocab 98: model has 97 tokens"),
        (["--shards", "/nonexistent"], "/nonexistent: holds no shards"),
    ],
)
def test_wrong_options_are_named(
    settings: MtpSettings, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """Wrong in themselves: usage. Wrong for this model, these shards: what is configured cannot be used."""
    words = ["train", "mtp", str(settings.model), "--shards", str(settings.shards[0]), "-o", str(settings.plan.output)]
    assert main([*words, *options]) == (2 if "must be" in message else 78)
    assert message in capsys.readouterr().err


def test_the_commands_collect_and_train(
    settings: MtpSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, shards, output = settings.model.parent / "corpus.safetensors", tmp_path / "shards", tmp_path / "run"
    assert main(["train", "collect", str(settings.model), "--corpus", str(corpus), "-o", str(shards)]) == 0
    words = ["train", "mtp", str(settings.model), "--shards", str(shards), "-o", str(output), "--stop-after", "2"]
    assert main([*words, "--without", "input_norm", "--feedback", "pre_norm"]) == 0
    assert "drafts kept of 3" in capsys.readouterr().out
    config = read_head(output / "head").config
    assert (config.input_norm, config.feedback) == (False, "pre_norm")
