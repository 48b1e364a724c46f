"""Writes tests/data/smollm2_reference.json: what transformers' own fp32 `generate` says, for the tests to agree with.

    python -m benchmarks.reference_tokens            # about 6 minutes

Greedy, one prompt at a time, the end-of-sequence token not heeded: every prompt has the same number of tokens. Each
position has the gap between its two largest logits. Where it is tiny, rounding decides: a test may accept another
token there, and nowhere else. The same versions and the same number of threads give the same file.

Prompts are texts turned into token ids by specd's own tokenizer; both sides get the ids.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch

from specd.bench.prompts import CHAT, COPY
from specd.models.fetch import resolve
from specd.models.gguf import read_metadata
from specd.server.chat import render
from specd.text import Tokenizer

MODEL = "smollm2-135m"
FILE = Path(__file__).parents[1] / "tests" / "data" / "smollm2_reference.json"
NUM_TOKENS = 128
PACKAGES = ("torch", "transformers", "gguf", "numpy")

RAW = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "In 1969, two astronauts walked on the moon for the first time. They had travelled",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Der schnelle braune Fuchs springt über den faulen Hund. Ein Hund",
    "Dear Ms. Whitlock,\n\nThank you for your letter of 3 May about the lighthouse. I am glad to tell you that",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    name: str  # kind and number: "chat-0"
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """Greedy tokens of one prompt, and at each position the gap between the two largest logits."""

    output_ids: tuple[int, ...]
    gaps: tuple[float, ...]


def chat_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """One user message through the model's own template."""
    assert tokenizer.chat_template is not None
    chat = render(
        [{"role": "user", "content": text}],
        template=tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.special_tokens,
    )
    return tuple(tokenizer.encode_chat(chat))


def prompts(tokenizer: Tokenizer) -> list[Prompt]:
    """Chats, chats whose answer copies from the prompt, and plain text to be continued."""
    chats = [Prompt(f"chat-{i}", chat_ids(tokenizer, text)) for i, text in enumerate(CHAT)]
    copies = [Prompt(f"copy-{i}", chat_ids(tokenizer, text)) for i, text in enumerate(COPY)]
    return chats + copies + [Prompt(f"raw-{i}", tuple(tokenizer.encode(text))) for i, text in enumerate(RAW)]


def load_transformers(path: Path) -> Any:
    """transformers' own model of a GGUF file, in fp32, ready to generate."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def generate(model: Any, prompt_ids: tuple[int, ...], num_tokens: int) -> Reference:
    """`num_tokens` greedy tokens by transformers' `generate`, past the end-of-sequence token if need be."""
    ids = torch.tensor([prompt_ids])
    model.generation_config.eos_token_id = None
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = tuple(output.sequences[0, len(prompt_ids) :].tolist())
    top = torch.stack([logits[0] for logits in output.logits]).topk(2).values
    gaps = tuple(round(gap, 6) for gap in (top[:, 0] - top[:, 1]).tolist())
    return Reference(tokens, gaps)


def document(entries: list[tuple[Prompt, Reference]]) -> dict[str, Any]:
    """The file's content."""
    return {
        "model": MODEL,
        "made_by": "python -m benchmarks.reference_tokens",
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
        "prompts": [
            {
                "name": prompt.name,
                "prompt_ids": list(prompt.ids),
                "output_ids": list(reference.output_ids),
                "gaps": list(reference.gaps),
            }
            for prompt, reference in entries
        ],
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """JSON with one line per list, so that a changed token is one line of a diff."""
    head = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if key != "prompts"]
    blocks = [
        "{" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in prompt.items()) + "}"
        for prompt in content["prompts"]
    ]
    text = "{" + ",\n".join([*head, '"prompts": [\n' + ",\n".join(blocks) + "\n]"]) + "}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference_tokens", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--prompts", type=int, default=None, help="the first so many only")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = resolve(MODEL)
    tokenizer = Tokenizer.load(path, read_metadata=read_metadata)
    model = load_transformers(path)
    entries = []
    for prompt in prompts(tokenizer)[: args.prompts]:
        entries.append((prompt, generate(model, prompt.ids, args.tokens)))
        print(f"{prompt.name}: {len(prompt.ids)} tokens, smallest gap {min(entries[-1][1].gaps)}", flush=True)
        print("   ", repr(tokenizer.decode(entries[-1][1].output_ids)[:100]), flush=True)
    write(args.output, document(entries))


if __name__ == "__main__":
    main()
