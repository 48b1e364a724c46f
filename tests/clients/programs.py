"""Clients that are programs of their own: Node's SDKs and the `llm` command.

A Node script takes one JSON argument and writes a JSON line for each piece of text; a line on its standard input makes
it leave. Source: client.mjs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.sdks import OPENAI_WRONG, PARAMETERS, SCHEMA_PROMPT, TOOL, TOOL_PROMPT, Person, Weather, library
from tests.clients.served import KEY, MODEL

_FOLDER = Path(__file__).parent
_TIMEOUT_S = 120
_LEAVING_S = 1


class ProgramError(Exception):
    """What a program failed with. kind: the name of its exception's class; status: of HTTP, if there was one."""

    def __init__(self, kind: str, message: str, status_code: int | None) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.status_code = status_code


class NodeClient:
    """One SDK of client.mjs. The packages of package.json: `npm ci` in this folder."""

    sdk: str
    wrong: dict[int, str]
    broken: tuple[str, ...]

    def __init__(self, url: str, *, key: str = KEY, retries: int = 0, model: str = MODEL) -> None:
        if shutil.which("node") is None:
            pytest.skip("node is not installed")
        if not (_FOLDER / "node_modules").is_dir():
            pytest.skip("tests/clients/node_modules is missing (npm ci)")
        self._fixed = {"sdk": self.sdk, "url": url, "key": key, "retries": retries, "model": model}

    def answer(self, prompt: str, max_tokens: int, **fields: Any) -> str:
        return str(self._run("answer", prompt=prompt, maxTokens=max_tokens, fields=fields))

    def stream(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        with self._process("stream", prompt=prompt, maxTokens=max_tokens) as process:
            assert process.stdin is not None
            try:
                for piece in _lines(process):
                    if "text" in piece:
                        yield piece["text"]
            except GeneratorExit:
                process.stdin.write("leave\n")
                process.stdin.flush()
                raise
            assert piece == {"value": None}, "the last line says that the text is whole"

    def person(self) -> dict[str, Any]:
        return Person.model_validate(self._run("person", prompt=SCHEMA_PROMPT, maxTokens=100)).model_dump()

    def call(self, choice: str) -> tuple[str, dict[str, Any]]:
        found = self._run("call", prompt=TOOL_PROMPT, maxTokens=100, choice=choice, tool=TOOL, parameters=PARAMETERS)
        return found["name"], Weather.model_validate(found["arguments"]).model_dump()

    def _run(self, operation: str, **asked: Any) -> Any:
        with self._process(operation, **asked) as process:
            (last,) = _lines(process)
            return last["value"]

    @contextlib.contextmanager
    def _process(self, operation: str, **asked: Any) -> Iterator[subprocess.Popen[str]]:
        argument = json.dumps({**self._fixed, "operation": operation, **asked})
        command = ["node", str(_FOLDER / "client.mjs"), argument]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
                assert process.stdin is not None
                process.stdin.close()
                process.wait(_TIMEOUT_S)
            finally:
                process.kill()


def _lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What a script writes. Raises ProgramError where it says that it failed."""
    assert process.stdout is not None
    for line in process.stdout:
        found = json.loads(line)
        if "error" in found:
            raise ProgramError(found["error"], found["message"], found["status"])
        yield found


class OpenAINode(NodeClient):
    sdk = "openai"
    wrong = OPENAI_WRONG
    broken = ("APIError", "TypeError", "Error")


class VercelAI(NodeClient):
    sdk = "ai"
    wrong = dict.fromkeys(OPENAI_WRONG, "AI_APICallError")
    broken = ("TypeError", "Error", "AI_APICallError", "Object")


_ENDS = ("0", "2")  # tokens that end an answer of the default model


class LlmCommand:
    """`llm` as a person runs it: text on its standard output, exit code 1 when something is wrong."""

    wrong = dict.fromkeys((400, 401, 404), "Error")
    broken = ("Error",)

    def __init__(self, url: str, *, folder: Path, key: str = KEY, model: str = MODEL) -> None:
        library("llm")
        folder.mkdir(parents=True, exist_ok=True)
        entry = {"model_id": "served", "model_name": model, "api_base": f"{url}/v1", "api_key_name": "served",
                 "supports_schema": True, "supports_tools": True}  # fmt: skip
        (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
        self._env = {**os.environ, "LLM_USER_PATH": str(folder)}
        self._key = key

    def _command(self, prompt: str, max_tokens: int, *options: str, temperature: float = 0) -> list[str]:
        fixed = ["-m", "served", "--key", self._key, "-o", "temperature", str(temperature), "--no-log"]
        return [sys.executable, "-m", "llm", *fixed, "-o", "max_tokens", str(max_tokens), *options, prompt]

    def answer(self, prompt: str, max_tokens: int, **fields: Any) -> str:
        return self._run(self._command(prompt, max_tokens, "--no-stream", **fields))

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        _check(done.returncode, done.stderr)
        return done.stdout.removesuffix("\n")  # it ends the line

    def stream(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        endless = ("-o", "logit_bias", json.dumps(dict.fromkeys(_ENDS, -100)))  # it takes a while to leave
        with subprocess.Popen(self._command(prompt, max_tokens, *endless), env=self._env, **pipes) as process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                held = b""
                while piece := process.stdout.read1():
                    whole = held + piece
                    text = whole.removesuffix(b"\n")
                    held = whole[len(text) :]
                    if text:
                        yield text.decode()
                _check(process.wait(_TIMEOUT_S), process.stderr.read().decode())
            except GeneratorExit:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may read on for seconds: then it is killed
                    process.wait(_LEAVING_S)
                raise
            finally:
                process.kill()

    def person(self) -> dict[str, Any]:
        command = self._command(SCHEMA_PROMPT, 100, "--schema", json.dumps(Person.model_json_schema()))
        return Person.model_validate_json(self._run(command)).model_dump()


def _check(code: int, stderr: str) -> None:
    if code:
        kind, _, message = stderr.strip().splitlines()[-1].partition(": ")
        status = message.removeprefix("Error code: ").partition(" ")[0]
        raise ProgramError(kind, message, int(status) if status.isdigit() else None)
