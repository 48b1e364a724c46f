"""Text of others as sequences: what is learned from, what is cut, and which lines are refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specd.cli import main
from specd.errors import ConfigError
from specd.models.gguf import read_metadata
from specd.server.chat import render
from specd.text import Tokenizer
from specd.train.corpus import OTHERS, Text
from specd.train.given import GivenReader
from specd.train.shards import read_shards
from specd.train.template import ChatRenderer
from tests.tiny import write_hf_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("given") / "model")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model, read_metadata=read_metadata)


def renderer(tokenizer: Tokenizer, template: str | None = None) -> ChatRenderer:
    assert tokenizer.chat_template is not None
    return functools.partial(
        render,
        template=template or tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.special_tokens,
    )


def read(tokenizer: Tokenizer, path: Path, *lines: Any, longest: int = 2048, template: str | None = None) -> list[Text]:
    """lines: a string as it stands, anything else as JSON."""
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return GivenReader(tokenizer, renderer(tokenizer, template), longest=longest).read(path)


def turns(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)], "id": 7}


def learned(tokenizer: Tokenizer, text: Text) -> list[str]:
    """The stretches that are learned from."""
    stretches, last = [""], False
    for token, role in zip(text.ids.tolist(), text.role.tolist(), strict=True):
        if role == OTHERS and not last and stretches[-1]:
            stretches.append("")
        stretches[-1] += tokenizer.decode([token], skip_special=False) if role == OTHERS else ""
        last = role == OTHERS
    return stretches


def test_a_text_file_is_one_text_in_pieces(tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = "The quick brown fox\n\njumps over the lazy dog. " * 30
    pieces = read(tokenizer, tmp_path / "a.txt", words, longest=50)
    assert [len(piece.ids) for piece in pieces[:-1]] == [50] * (len(pieces) - 1)
    assert [int(i) for piece in pieces for i in piece.ids] == tokenizer.encode(words)
    assert all((piece.role == OTHERS).all() for piece in pieces)
    assert [i for i, piece in enumerate(pieces) if piece.held_out] == list(range(0, len(pieces), 20))


def test_of_a_chat_the_assistants_turns_are_learned(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [turns("Hello", "How are you?", "over", "the <|im_end|> dog"), "", {"text": "quick brown"}]
    chat, text = read(tokenizer, tmp_path / "a.jsonl", *lines)
    # What ends a turn is learned; text that reads like it is text, and does not end one.
    assert learned(tokenizer, chat) == ["How are you?<|im_end|>", "the <|im_end|> dog<|im_end|>"]
    assert (chat.ids == 2).sum() == 4
    assert learned(tokenizer, text) == ["quick brown"]
    assert (chat.held_out, text.held_out) == (True, False)


def test_a_turn_begins_with_what_its_first_token_covers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """An answer that begins with a newline shares a token with the template's: that token is the answer's."""
    (chat,) = read(tokenizer, tmp_path / "a.jsonl", turns("Hello", "\n\nworld"))
    assert learned(tokenizer, chat)[0].endswith("\n\nworld<|im_end|>")


def test_long_chats_are_cut_off_and_told(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = read(tokenizer, tmp_path / "a.jsonl", turns("Hello", "world " * 100), turns("Hello", "fox"), longest=60)
    assert len(chats[0].ids) == 60 > len(chats[1].ids)
    assert capsys.readouterr().err == "1 chats were cut off at 60 tokens\n"
    with pytest.raises(ConfigError, match=r"a.jsonl:1: no token of an assistant's turn among the first 60"):
        read(tokenizer, tmp_path / "a.jsonl", turns("world " * 100, "Hello"), longest=60)


_FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>'"
    " }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
_STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('a user speaks first') }}{% endif %}x"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON: "),
        ("[]", 'not an object with either "text" or "messages"'),
        ({"prompt": "a"}, 'not an object with either "text" or "messages"'),
        ({"text": "a", "messages": []}, 'not an object with either "text" or "messages"'),
        ({"text": 5}, '"text" is int, not a string'),
        ({"text": ""}, "the text is empty"),
        ({"messages": []}, '"messages" is not a list of messages'),
        ({"messages": ["a"]}, r'messages\[0\] has no "role"'),
        ({"messages": [{"role": "user"}]}, r'messages\[0\] has no "content"'),
        (turns("a"), "no message is the assistant's: there is nothing to learn"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "is not a text part"),
    ],
)
def test_a_bad_line_is_named(tokenizer: Tokenizer, tmp_path: Path, line: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"a.jsonl:2: .*{reason}"):
        read(tokenizer, tmp_path / "a.jsonl", turns("a", "b"), line)


@pytest.mark.parametrize(
    ("template", "chat", "reason"),
    [
        (_FORGETFUL, turns("a", "b", "c", "d"), r"messages\[1\]: the chat template writes what is before it otherwise"),
        (_STRICT, {"messages": [{"role": "assistant", "content": "b"}]}, "a user speaks first"),
    ],
)
def test_what_the_template_cannot_say_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, template: str, chat: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"a.jsonl:1: .*{reason}"):
        read(tokenizer, tmp_path / "a.jsonl", chat, template=template)


def test_files_that_cannot_be_read_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    reader = GivenReader(tokenizer, None, longest=10)
    with pytest.raises(ConfigError, match=r"a\.csv: neither \.txt"):
        reader.read(tmp_path / "a.csv")
    with pytest.raises(ConfigError, match=r"a\.txt: cannot be read"):
        reader.read(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"a\.txt: not UTF-8"):
        reader.read(tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl: is empty"):
        reader.read(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text(json.dumps(turns("a", "b")))
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the model has no chat template"):
        reader.read(tmp_path / "a.jsonl")


def test_collect_computes_given_text(model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    given, shards = tmp_path / "a.jsonl", tmp_path / "shards"
    given.write_text("\n".join(json.dumps(line) for line in (turns("Hello", "fox"), {"text": "over the lazy dog"})))
    assert main(["train", "collect", str(model), "--given", str(given), "-o", str(shards)]) == 0
    data = read_shards(shards)
    chat, text = GivenReader(tokenizer, renderer(tokenizer), longest=2048).read(given)
    assert data.ids.tolist() == [*chat.ids.tolist(), *text.ids.tolist()]
    assert data.written.tolist() == [bool(role) for role in (*chat.role, *text.role)]
    assert torch.isfinite(data.hidden.float()).all()


def test_given_chats_are_joined_as_the_template_goes_on(
    model: Path, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, shards = tmp_path / "a.jsonl", tmp_path / "shards"
    given.write_text("\n".join(json.dumps(turns(word, f"the {word}")) for word in ("fox", "dog", "lazy", "over") * 10))
    words = ["train", "collect", str(model), "--given", str(given), "-o", str(shards)]
    assert main([*words, "--join", "80"]) == 0
    said = capsys.readouterr().err
    data = read_shards(shards)
    joined = [i for i, size in enumerate(data.lens.tolist()) if size > 40]
    assert f"{sum(data.lens[joined].tolist())} of {len(data.ids)} tokens are in joined chats\n" in said
    start = int(data.starts[joined[0]])
    text = tokenizer.decode(data.ids[start : start + int(data.lens[joined[0]])].tolist(), skip_special=False)
    questions = [line.removesuffix("<|im_end|>") for line in text.split("<|im_start|>user\n")[1:]]
    pairs = [question.split("<|im_end|>\n<|im_start|>assistant\nthe ") for question in questions]
    assert len(pairs) > 1
    ends = ["<|im_end|>\n"] * (len(pairs) - 1) + [""]
    assert [answer for _, answer in pairs] == [word + end for (word, _), end in zip(pairs, ends, strict=True)]
    given.write_text(json.dumps({"text": "quick brown fox " * 100}))
    assert main([*words[:-1], str(tmp_path / "other"), "--join", "80"]) == 78
    assert "--join 80: no two chats could be joined: 0 of " in capsys.readouterr().err


def test_the_command_names_the_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "a.jsonl"
    given.write_text('{"text": "a"}\n{"text": 1}\n')
    assert main(["train", "collect", str(model), "--given", str(given), "-o", str(tmp_path / "shards")]) == 78
    assert f'specd: {given}:2: "text" is int, not a string\n' in capsys.readouterr().err
