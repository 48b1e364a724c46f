"""Host code runs without torch: each module is imported in a process of its own, where torch must not turn up."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def host_modules() -> list[str]:
    """The modules of the contract in pyproject.toml, packages with everything in them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract.get("forbidden_modules") == ["torch"]]
    names: list[str] = []
    for name in contract["source_modules"]:
        path = ROOT.joinpath(*name.split("."))
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        names += [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return names


# One process for all: each module is imported after the traces of the one before it are removed, so that the first
# one to pull torch in is named and does not hide behind another.
SCRIPT = """
import sys, importlib
sys.modules["torch"] = None  # an import of it, however deep, raises ModuleNotFoundError
failed = []
for name in sys.argv[1:]:
    for loaded in [key for key in sys.modules if key.split(".")[0] == "specd"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
print("\\n".join(failed))
"""


def imports_without_torch(names: list[str]) -> str:
    """The modules that cannot be imported without torch, one a line."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, cwd=ROOT, check=True, timeout=120
    )
    return result.stdout.strip()


def test_host_modules_import_without_torch() -> None:
    names = host_modules()
    assert "specd.server.admin" in names
    assert imports_without_torch(names) == ""


def test_the_check_can_fail() -> None:
    assert "specd.tensors" in imports_without_torch(["specd.errors", "specd.tensors"])


@pytest.mark.parametrize("command", ["--help", "--version", "ctl --help"])
def test_help_is_instant(command: str) -> None:
    """Neither torch nor anything else that takes seconds is loaded to print help."""
    script = (
        "import sys\nfrom specd.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'torch', 'aiohttp', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, *command.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    assert result.stdout.splitlines()[-1] == "[]"
