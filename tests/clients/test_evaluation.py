"""lm-eval against the server alone (remote tokenizer): the same scores with speculation on and off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.sdks import library
from tests.clients.served import KEY, MODEL, Served

pytestmark = [
    pytest.mark.clients,
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore"),  # those of other people's libraries
]

ROWS = [
    {"question": "The capital of France is", "options": ["Paris", "Berlin", "a kind of cheese"], "answer": 0},
    {"question": "Two and two are", "options": ["seven", "four", "blue"], "answer": 1},
    {"question": "one two three one two three one two", "options": ["three", "nine", "France"], "answer": 0},
]
CHOICES = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
TEXTS = """
task: tiny_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{options[answer]}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 24, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def test_scores_do_not_depend_on_speculation(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    library("lm_eval")
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in ROWS))
    for name, task in (("choices", CHOICES), ("texts", TEXTS)):
        (tmp_path / f"{name}.yaml").write_text(task.format(data=data))

    served.until_idle()
    on = evaluate(served, tmp_path)
    drafted = served.stats()["draft_tokens"]
    served.control("PATCH", "/v1/speculation", {"mode": "off"})
    try:
        off = evaluate(served, tmp_path)
    finally:
        served.control("PATCH", "/v1/speculation", {"mode": "auto"})
    assert served.stats()["draft_tokens"] == drafted, "it was off"
    assert sum(drafted.values()) > 0, "it was on"
    assert on == off
    assert on["scores"]["tiny_choices"]["acc,none"] > 0.5, "better than one of three"


def evaluate(served: Served, folder: Path) -> dict[str, Any]:
    """Scores, and what they were made of: log-probabilities and texts of every question."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    arguments = {
        "model": MODEL,
        "base_url": f"{served.url}/v1/completions",
        "auth_token": KEY,
        "tokenizer_backend": "remote",
        "tokenized_requests": True,
        "num_concurrent": 3,
        "max_retries": 1,
    }
    found = simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["tiny_choices", "tiny_texts"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = {name: [row["resps"] for row in rows] for name, rows in found["samples"].items()}
    return {"scores": found["results"], "samples": samples}
