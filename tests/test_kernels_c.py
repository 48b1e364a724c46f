"""tests/kernels/*.c, built with the address and undefined-behaviour sanitizers, when there is a compiler."""

from __future__ import annotations

import concurrent.futures
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "specd" / "kernels" / "src"
COMPILER = shutil.which("cc") or shutil.which("gcc")
FLAGS = [
    "-std=c11", "-D_GNU_SOURCE", "-g", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-Wall", "-Wextra",
    "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{SOURCES}",
]  # fmt: skip
# Not optimised as far as intrinsics allow, and nothing inlined by force: -O3 takes minutes under the sanitizers.
LEVELS = {
    "level_portable": ["-O0", "-DINLINE=static inline"],
    "level_avx2": ["-O1", "-DINLINE=static inline", "-mavx2", "-mfma", "-mf16c"],
    "level_avx512": [
        "-O1", "-DINLINE=static inline", "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl",
        "-mavx512dq", "-mavx512vnni",
    ],
}  # fmt: skip


def build(folder: Path) -> Path:
    """The program; skips when the compiler has no sanitizers or no OpenMP."""
    assert COMPILER is not None
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    tried = subprocess.run(
        [COMPILER, *FLAGS, str(probe), "-o", str(folder / "probe")], capture_output=True, check=False, text=True
    )
    if tried.returncode or subprocess.run([str(folder / "probe")], check=False).returncode:
        pytest.skip(f"the compiler has no sanitizers: {tried.stderr[-300:]}")
    levels = LEVELS if platform.machine() == "x86_64" else ["level_portable"]
    names = ["run", "pack", "step", *levels]
    sources = [SOURCES / f"{name}.c" for name in names] + sorted((ROOT / "tests" / "kernels").glob("*.c"))

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        flags = [*FLAGS, *LEVELS.get(source.stem, ["-O1"])]
        done = subprocess.run(
            [COMPILER, *flags, "-c", str(source), "-o", str(target)], capture_output=True, check=False, text=True
        )
        assert done.returncode == 0, done.stderr
        return str(target)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run([COMPILER, *FLAGS, *objects, "-lm", "-o", str(folder / "kernels")], check=True)
    return folder / "kernels"


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_every_format_and_phase_under_the_sanitizers(tmp_path: Path) -> None:
    program = build(tmp_path)
    # libgomp keeps its threads' memory to the end: not a leak of ours.
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([str(program)], capture_output=True, check=False, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "portable" in done.stdout
