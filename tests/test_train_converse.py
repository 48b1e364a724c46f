"""Chats that the model writes alone: what they are made of, that nothing beside them matters, going on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from specd.cli import main
from specd.errors import ConfigError, ModelError
from specd.models.gguf import read_metadata
from specd.server.chat import render
from specd.text import Tokenizer
from specd.train.converse import ConverseSettings, converse
from specd.train.corpus import ANSWER, GIVEN, USER, read_corpus
from specd.train.journal import Chat, Journal
from specd.train.shards import read_shards
from specd.train.template import ChatRenderer, turn_tokens
from tests.tiny import CHATML, tiny_config, tiny_weights, write_hf_folder

_LONGEST = 120


def renderer(tokenizer: Tokenizer, template: str = CHATML) -> ChatRenderer:
    return functools.partial(
        render,
        template=template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.special_tokens,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that likes to end its turns."""
    config = tiny_config(vocab_size=320)
    weights = tiny_weights(config)
    weights["lm_head.weight"] = weights["lm_head.weight"].clone()
    weights["lm_head.weight"][2] *= 3
    return write_hf_folder(tmp_path_factory.mktemp("converse") / "model", config=config, weights=weights)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model, read_metadata=read_metadata)


@pytest.fixture(scope="module")
def settings(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ConverseSettings:
    """Of a finished run."""
    output = tmp_path_factory.mktemp("chats") / "chats.safetensors"
    settings = ConverseSettings(
        model, output, chats=20, temperatures=(0.0, 1.0), chat_tokens=_LONGEST, concurrency=8, threads=1
    )
    converse(settings, renderer)
    return settings


def test_a_chat_is_what_the_template_would_write(settings: ConverseSettings, tokenizer: Tokenizer) -> None:
    texts = read_corpus(settings.output)
    turns = turn_tokens(tokenizer, renderer(tokenizer), (2, 0))
    assert len(texts) == 20
    finished = 0
    for index, text in enumerate(texts):
        groups = itertools.groupby(zip(text.role.tolist(), text.ids.tolist(), strict=True), key=lambda pair: pair[0])
        parts = [(role, tuple(token for _, token in pairs)) for role, pairs in groups]
        kinds = ((GIVEN, turns.opening), (USER, None), (GIVEN, turns.after_user), (ANSWER, None))
        cycle = [*kinds, *((GIVEN, turns.after_answer), *kinds[1:]) * 2]
        for (role, ids), (kind, header) in zip(parts, cycle, strict=False):
            assert role == kind
            assert header is None or ids == header
        assert all(ids[-1] == 2 for role, ids in parts[:-1] if role != GIVEN)
        answers = sum(role == ANSWER for role, _ in parts)
        assert answers <= 1 + index % 3
        done = answers == 1 + index % 3 and parts[-1][1][-1] == 2
        finished += done
        assert len(text.ids) <= _LONGEST
        assert done or len(text.ids) > _LONGEST - 20 or parts[-1][1][-1] == 0  # 0 ends more than a turn
    assert finished > 5
    heat = load_file(settings.output)["temperature"].tolist()
    assert heat == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 3 + [0.0, 0.0]


def test_whole_chats_are_encoded_as_they_were_sampled(settings: ConverseSettings, tokenizer: Tokenizer) -> None:
    """The header is the template's own: a chat that is rendered and encoded begins with the same tokens."""
    rendered = renderer(tokenizer)([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    ids = tokenizer.encode_chat(rendered)
    turns = turn_tokens(tokenizer, renderer(tokenizer), (2, 0))
    hello = tokenizer.encode("Hello")
    assert ids == [*turns.opening, *hello, turns.user_end, *turns.after_user]
    assert read_corpus(settings.output)[0].ids[: len(turns.opening)].tolist() == list(turns.opening)


def test_chats_do_not_depend_on_what_runs_beside_them(settings: ConverseSettings, tmp_path: Path) -> None:
    other = dataclasses.replace(settings, output=tmp_path / "a.safetensors", concurrency=3)
    assert converse(other, renderer).read_bytes() == settings.output.read_bytes()
    other = dataclasses.replace(settings, output=tmp_path / "b.safetensors", seed=1)
    assert converse(other, renderer).read_bytes() != settings.output.read_bytes()


def test_a_run_goes_on_from_its_journal(
    settings: ConverseSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = read_corpus(settings.output)
    heat = load_file(settings.output)["temperature"].tolist()
    lines = [
        orjson.dumps({"chat": i, "ids": texts[i].ids.tolist(), "role": texts[i].role.tolist(), "temperature": heat[i]})
        for i in (7, 0, 3)
    ]
    journal = tmp_path / "a.journal.jsonl"
    journal.write_bytes(b"\n".join([orjson.dumps(settings.identity()), *lines, b'{"chat": 1, "ids": [1, 2']))
    other = dataclasses.replace(settings, output=tmp_path / "a.safetensors")
    assert converse(other, renderer).read_bytes() == settings.output.read_bytes()
    said = capsys.readouterr().err
    assert "17 chats of at most 120 tokens: at most 0.0 MB; at " in said
    assert "17/17 chats, " in said
    assert not journal.exists()
    converse(other, renderer)
    assert "a.safetensors is there" in capsys.readouterr().err


def test_what_is_of_other_settings_is_refused(settings: ConverseSettings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chats\.safetensors: was made with seed 0, not 1; give another file"):
        converse(dataclasses.replace(settings, seed=1), renderer)
    other = dataclasses.replace(settings, output=tmp_path / "a.safetensors")
    journal = tmp_path / "a.journal.jsonl"
    journal.write_bytes(orjson.dumps(settings.identity() | {"turns": 2}) + b"\n")
    with pytest.raises(ConfigError, match="was begun with turns 2, not 3; give the same settings, or remove it"):
        converse(other, renderer)
    journal.write_bytes(b"nothing\n")
    with pytest.raises(ConfigError, match="not a journal of chats"):
        converse(other, renderer)
    torn = {"chat": 0, "ids": [1, 2], "role": [0], "temperature": 0.5}
    journal.write_bytes(orjson.dumps(settings.identity()) + b"\n" + orjson.dumps(torn) + b"\n")
    with pytest.raises(ConfigError, match=r"not a journal of chats: .*2 ids and 1 roles"):
        converse(other, renderer)
    save_file({"ids": torch.zeros(1)}, tmp_path / "list.safetensors", metadata={"specd_chats": "[1]"})
    with pytest.raises(ConfigError, match=r"is there, and not of such a run"):
        converse(dataclasses.replace(settings, output=tmp_path / "list.safetensors"), renderer)
    journal.write_bytes(b"[1]\n")
    with pytest.raises(ConfigError, match=r"not a journal of chats: .*the first line is list, not an object"):
        converse(other, renderer)


def test_a_torn_line_is_dropped_without_a_moment_in_which_the_rest_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.journal.jsonl"
    with Journal.open(path, {"seed": 1}) as journal:
        journal.add(3, Chat([1, 2], [0, 1], 0.5))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"chat": 4')

    def crash(self: Path, target: Path) -> Path:
        raise OSError(f"{self} to {target}")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match=r"partial to .*a\.journal\.jsonl"):
            Journal.open(path, {"seed": 1})
    assert path.read_bytes() == whole + b'{"chat": 4'
    with Journal.open(path, {"seed": 1}) as journal:
        assert journal.chats.keys() == {3}
    assert path.read_bytes() == whole


_NO_END = CHATML.replace("'<|im_end|>'", "'END'")
_LAST_ONLY = "{{ '<|im_start|>' + messages[-1].content + '<|im_end|>' }}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (_NO_END, "the user's turn ends with 'END.*' and not with an end token: it cannot be sampled"),
        (_LAST_ONLY, "leaves out a turn of three"),
        ("{{ raise_exception('never') }}", "no chat can be rendered: .*never"),
    ],
)
def test_a_template_whose_turns_cannot_be_sampled_is_refused(tokenizer: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        turn_tokens(tokenizer, renderer(tokenizer, template), (2, 0))


def test_an_opening_that_leaves_no_room_is_refused(settings: ConverseSettings, tmp_path: Path) -> None:
    other = dataclasses.replace(settings, output=tmp_path / "a.safetensors", chat_tokens=3)
    with pytest.raises(ConfigError, match=r"--chat-tokens 3: what opens a chat has \d tokens already"):
        converse(other, renderer)


def test_the_commands_converse_and_collect(model: Path, tmp_path: Path) -> None:
    options = ["--turns", "1", "--chat-tokens", "60", "--temperature", "0.5", "--threads", "1"]
    corpus = tmp_path / "chats.safetensors"
    assert main(["train", "converse", str(model), "-o", str(corpus), "--chats", "3", *options]) == 0
    shards = tmp_path / "shards"
    assert main(["train", "collect", str(model), "-o", str(shards), "--self-prompt", "3", *options]) == 0
    assert (shards / "chats.safetensors").read_bytes() == corpus.read_bytes()
    data, texts = read_shards(shards), read_corpus(corpus)
    assert data.ids.tolist() == np.concatenate([text.ids for text in texts]).tolist()
    assert load_file(corpus)["temperature"].tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "3"], "--temperature 3.0: must be from 0 to 2"),
        (["--top-p", "0"], "--top-p 0.0: must be above 0"),
        (["--turns", "0"], "--turns 0: must be at least 1"),
        (["-o", "chats.npz"], "--output chats.npz: must end in .safetensors"),
    ],
)
def test_wrong_options_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    words: list[Any] = ["train", "converse", str(model), "-o", str(tmp_path / "a.safetensors"), "--chats", "1"]
    assert main([*words, *options]) == 2
    assert message in capsys.readouterr().err
