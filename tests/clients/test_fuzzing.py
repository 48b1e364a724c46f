"""schemathesis over the server's own description, while another client's stream runs on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.sdks import library
from tests.clients.served import KEY, MODEL, SMALL_KEY, Served, serve

pytestmark = pytest.mark.clients

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
SECONDS = 45
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/models/{name}")


@pytest.fixture(scope="module")
def small(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random tiny model of a short context: no body that is made up keeps it busy for long."""
    limits = ("model.max_len=64", "server.max_choices=2", "scheduler.max_running=8", "speculation.draft=ngram")
    with serve(tiny_folder, tmp_path_factory.mktemp("small"), *limits) as found:
        yield found


def witness(served: Served) -> str:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=120) as sdk:
        fields: dict[str, Any] = {"max_tokens": 50, "seed": 3, "extra_body": {"ignore_eos": True}}
        chunks = sdk.completions.create(model=MODEL, prompt="a witness", temperature=1, stream=True, **fields)
        return "".join(chunk.choices[0].text for chunk in chunks)


@pytest.mark.timeout(240)
def test_no_body_is_a_fault_or_changes_another_stream(small: Served, tmp_path: Path) -> None:
    library("schemathesis")
    alone = witness(small)
    over = threading.Event()
    texts: list[str] = []

    def watch() -> None:
        while not over.is_set():
            texts.append(witness(small))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        report = fuzz(small, tmp_path)
    finally:
        over.set()
        watching.join()
    assert report["exit"] == 0, report["output"]
    assert len(texts) > 2
    assert set(texts) == {alone}
    assert small.until_idle()["requests_failed"] == 0
    assert {status for path in PATHS[:4] for status in small.responses(path)} >= {"200", "400"}, "both kinds were met"


def fuzz(served: Served, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", "--checks", CHECKS]
    command += ["--phases", "coverage,fuzzing", "--max-time", str(SECONDS), "--seed", "1", "--request-timeout", "60"]
    headers = {"Authorization": f"Bearer {SMALL_KEY}", "x-request-timeout": "60"}  # a short one is an honest 503
    command += [word for name, value in headers.items() for word in ("--header", f"{name}: {value}")]
    env = os.environ | {"SCHEMATHESIS_HOOKS": "fuzz_hooks", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
    return {"exit": done.returncode, "output": done.stdout[-6000:] + done.stderr[-3000:]}
