"""The Containerfile, without building it: two stages, no compiler and no root in what runs, signals reach specd."""

from __future__ import annotations

import asyncio
import dataclasses
import fnmatch
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from specd.config import admin_socket_path
from specd.config_loader import load_config
from tests.daemons import free_port
from tests.fake_engine import FakeEngine
from tests.http_server import serve

ROOT = Path(__file__).parent.parent
COMPILERS = re.compile(r"\b(gcc|g\+\+|clang|cc|build-essential|make|cmake)\b")


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    image: str
    name: str
    instructions: tuple[tuple[str, str], ...]  # word, rest of the line

    def all(self, word: str) -> list[str]:
        return [rest for found, rest in self.instructions if found == word]

    def only(self, word: str) -> str:
        (rest,) = self.all(word)
        return rest


def stages(text: str) -> list[Stage]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found: list[Stage] = []
    for line in filter(None, joined.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            found.append(Stage(image, name, ()))
        elif found:
            found[-1] = dataclasses.replace(found[-1], instructions=(*found[-1].instructions, (word, rest.strip())))
    return found


@pytest.fixture
def text() -> str:
    return (ROOT / "Containerfile").read_text(encoding="utf-8")


def environment(stage: Stage) -> dict[str, str]:
    return dict(item.split("=", 1) for line in stage.all("ENV") for item in shlex.split(line))


def health_check(stage: Stage) -> list[str]:
    options, _, command = stage.only("HEALTHCHECK").partition(" CMD ")
    assert {option.split("=")[0] for option in options.split()} >= {"--timeout", "--start-period"}
    words: list[str] = json.loads(command)
    return words


def test_what_runs_has_no_compiler_and_is_not_root(text: str) -> None:
    build, final = stages(text)
    assert COMPILERS.search(" ".join(build.all("RUN"))), "the kernels are compiled"
    assert "kernels/_native" in " ".join(build.all("RUN")), "and it is checked that they were"
    assert not COMPILERS.search(" ".join(final.all("RUN")))
    assert not re.search(r"\bpip\b", " ".join(final.all("RUN"))), "nothing is built in the image that runs"
    assert final.all("COPY") == [f"--from={build.name} /opt/specd /opt/specd"]
    user, _, group = final.only("USER").partition(":")
    assert int(user) >= 1000, "a number, so that a cluster can see that it is not root"
    assert int(group) >= 1000
    after = [word for word, _ in final.instructions[final.instructions.index(("USER", f"{user}:{group}")) :]]
    assert "RUN" not in after


def test_images_come_from_wherever_the_builder_is_set_to(text: str) -> None:
    for stage in stages(text):
        assert re.fullmatch(r"[a-z]+:[^/]+", stage.image), "no registry's host"
    addresses = re.findall(r"\w+://[^\s'\"]+", text)
    assert [address for address in addresses if "127.0.0.1" not in address] == []


def test_a_signal_reaches_specd(text: str) -> None:
    """A shell between the two would not pass it on, and nothing would be drained."""
    *_, final = stages(text)
    assert json.loads(final.only("ENTRYPOINT")) == ["specd", "serve"]
    assert final.all("CMD") == []
    assert final.only("STOPSIGNAL") == "SIGTERM"


def test_its_environment_is_specd_s(text: str) -> None:
    *_, final = stages(text)
    env = environment(final)
    config = load_config(None, env={name: value for name, value in env.items() if name.startswith("SPECD_")})
    assert (config.server.host, str(config.server.port)) == ("0.0.0.0", final.only("EXPOSE"))
    folders = re.search(r"install -d -o specd -g specd -m 0750 (\S+) (\S+)", final.only("RUN"))
    assert folders is not None
    assert str(admin_socket_path("", env).parent) == folders[1]
    assert final.only("VOLUME") == folders[2] == env["XDG_CACHE_HOME"] + "/specd"
    assert env["HF_HOME"].startswith(folders[2] + "/")


async def test_the_health_check_asks_for_progress(text: str) -> None:
    command = health_check(stages(text)[-1])
    assert command[0] == "python"

    async def check(port: int) -> int:
        env = {**os.environ, "SPECD_SERVER__PORT": str(port)}
        child = await asyncio.create_subprocess_exec(
            sys.executable, *command[1:], env=env, stderr=asyncio.subprocess.DEVNULL
        )
        return await child.wait()

    engine = FakeEngine()
    async with serve(engine) as client:
        port = int(client.url.rsplit(":", 1)[1])
        assert await check(port) == 0
        engine.snapshot = dataclasses.replace(engine.snapshot, waiting=1, last_progress_s=1e6)
        assert await check(port) != 0
    assert await check(free_port()) != 0


def test_what_is_copied_is_there_and_is_not_ignored(text: str) -> None:
    build, _ = stages(text)
    sources = [name for line in build.all("COPY") for name in line.split()[:-1]]
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()

    def ignored(path: str) -> bool:
        taken = True
        for rule in rules:
            if fnmatch.fnmatch(path.split("/")[0], rule.lstrip("!")) or fnmatch.fnmatch("/" + path, rule):
                taken = rule.startswith("!")
        return not taken

    for name in sources:
        assert (ROOT / name).exists()
        assert not ignored(name)
    assert not ignored("specd/kernels/src/run.c")
    for name in (".git", "tests", "specd/__pycache__", "specd/kernels/_native.cpython-311-x86_64-linux-gnu.so"):
        assert ignored(name), name
