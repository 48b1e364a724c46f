"""Builds the CPU kernels: one shared library, called through ctypes, with one object file per instruction set.

Everything else is in pyproject.toml. The library is optional: without a C compiler, or when it fails, the install goes
on with a warning and specd computes with PyTorch instead. No -march=native: which object runs is decided by CPUID when
the library is loaded, so a build serves every machine of its architecture.
"""

from __future__ import annotations

import concurrent.futures
import os
import platform
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

_SOURCES = "specd/kernels/src"
# Contraction off: multiply-adds are fused where the source says so, and nowhere else, on every instruction set.
_FLAGS = [
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O3",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-math-errno",
    "-g0",
    "-Wall",
    "-Wextra",
]
_LEVELS = {
    "level_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "level_avx512": [
        "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni",
    ],
}  # fmt: skip


def _sources() -> list[str]:
    names = ["run", "pack", "step", "level_portable"]
    if platform.machine().lower() in ("x86_64", "amd64"):
        names += _LEVELS
    return [f"{_SOURCES}/{name}.c" for name in names]


class BuildKernels(build_ext):
    """Compiles each source with its own flags, several at a time."""

    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type != "unix":
            raise CompileError(f"specd's kernels are not built with {self.compiler.compiler_type}")
        openmp = self._openmp()

        def compile_one(source: str) -> list[str]:
            flags = [*_FLAGS, *openmp, *_LEVELS.get(Path(source).stem, [])]
            return self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=flags, depends=ext.depends
            )

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [name for names in pool.map(compile_one, ext.sources) for name in names]
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), libraries=["m"], extra_postargs=openmp, build_temp=self.build_temp
        )

    def _openmp(self) -> list[str]:
        """The flags that a small program with OpenMP compiles and links with; none when it does not."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("#include <omp.h>\nint probe(void) { return omp_get_max_threads(); }\n")
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=["-fopenmp"])
                self.compiler.link_shared_object(objects, str(Path(folder, "probe.so")), extra_postargs=["-fopenmp"])
            except (CompileError, LinkError):
                self.warn("the compiler has no OpenMP: specd's kernels will use one thread")
                return []
        return ["-fopenmp"]


setup(
    ext_modules=[
        Extension(
            "specd.kernels._native",
            sources=_sources(),
            depends=sorted(str(path) for path in Path(_SOURCES).glob("*.h")),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
