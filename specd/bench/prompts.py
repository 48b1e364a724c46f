"""What the load client asks: two built-in sets, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from specd.errors import ConfigError

Messages = list[dict[str, Any]]

CHAT = (
    "Explain in a few paragraphs how a bicycle stays upright while it is moving.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the main differences between TCP and UDP, and when would you use each of them?",
    "Give me a recipe for a simple vegetable soup, with quantities and the order of the steps.",
    "Describe the water cycle to a ten-year-old child.",
    "List five arguments for and five arguments against working from home.",
    "How does a hash table work, and why is a lookup in it usually fast?",
    "Write a polite letter to a neighbour who plays loud music at night.",
)

_PASSAGE = (
    "The harbour of Easthaven was built in 1887 by the engineer Clara Whitlock. It has two piers, the northern one 420 "
    "metres long and the southern one 310 metres long, and a lighthouse of red brick that is still in use. In 1953 a "
    "storm broke the northern pier in three places, and the repairs took four years. Today the harbour is home to 64 "
    "fishing boats, a small shipyard with 23 workers, and a museum that opens from April to October. The museum shows "
    "the original drawings, a model of the first crane, and the logbook of the lighthouse from 1887 to 1931."
)
_CODE = """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, quantity):
        if quantity <= 0:
            raise ValueError("quantity must be positive")
        self.items[name] = self.items.get(name, 0) + quantity

    def remove(self, name, quantity):
        if self.items.get(name, 0) < quantity:
            raise ValueError("not enough " + name)
        self.items[name] -= quantity
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())
"""
_RECORDS = "\n".join(
    f"{i}. order {4100 + 37 * i}, customer {name}, {count} boxes of {thing}, shipped to {city}"
    for i, (name, count, thing, city) in enumerate(
        (
            ("Okafor", 12, "candles", "Lagos"),
            ("Lindqvist", 3, "oak boards", "Malmo"),
            ("Moreau", 40, "glass jars", "Lyon"),
            ("Tanaka", 7, "paper lamps", "Osaka"),
            ("Silva", 25, "coffee filters", "Porto"),
            ("Novak", 9, "copper wire", "Brno"),
        ),
        start=1,
    )
)

COPY = (
    f"Repeat the following text exactly, without any change:\n\n{_PASSAGE}",
    f"Correct the spelling of the following text. If there is nothing to correct, repeat it as it is:\n\n{_PASSAGE}",
    f"Copy the following text, but write 'port' instead of 'harbour':\n\n{_PASSAGE}",
    f"Repeat this Python class and add a docstring to each method:\n\n```python\n{_CODE}```",
    f"Rename the method `remove` to `take` in this Python class and show the whole class:\n\n```python\n{_CODE}```",
    f"Write this Python class again with type annotations:\n\n```python\n{_CODE}```",
    f"Turn each line into a JSON object with the keys order, customer, boxes, goods and city:\n\n{_RECORDS}",
    f"Repeat the following list, line by line:\n\n{_RECORDS}",
)

SETS = {"chat": CHAT, "copy": COPY, "all": tuple(text for pair in zip(CHAT, COPY, strict=True) for text in pair)}


def built_in(name: str) -> list[Messages]:
    """ "chat", "copy" (the answer repeats much of the prompt) or "all" (both, alternating)."""
    return [_user(text) for text in SETS[name]]


def read_prompts(file: Path) -> list[Messages]:
    """One prompt a line, or JSON lines with `prompt` (text) or `messages`. Raises ConfigError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    prompts = [_parse(line, f"{file}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{file}: holds no prompt")
    return prompts


def _parse(line: str, where: str) -> Messages:
    if not line.lstrip().startswith("{"):
        return _user(line)
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: begins like JSON but is not: {error}") from error
    if isinstance(record.get("prompt"), str):
        return _user(record["prompt"])
    messages = record.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return messages
    raise ConfigError(f"{where}: needs `prompt` (text) or `messages` (a list of objects)")


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]
