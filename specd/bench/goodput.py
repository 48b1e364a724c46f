"""Goodput: the requests that met every limit of a service-level objective (DistServe, arXiv 2401.09670, section 3).

    ttft   from the arrival to the first text; without any text: to the end
    tpot   mean time for each token after the first
    itl    between two chunks, at the 99th percentile of the request's own gaps
    e2e    from the arrival to the end

A request that failed, whatever with, met nothing. Times in an objective are seconds; in reports milliseconds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specd.bench.client import Sample
from specd.bench.report import percentile
from specd.errors import UsageError


def _first(sample: Sample) -> float | None:
    return sample.total_s if sample.ttft_s is None else sample.ttft_s


def _per_token(sample: Sample) -> float | None:
    rate = sample.decode_tokens_per_s
    return None if rate is None else 1 / rate


# The time that each name limits; None: the request has none, and meets any limit.
TIMES: Mapping[str, Callable[[Sample], float | None]] = MappingProxyType(
    {
        "ttft": _first,
        "tpot": _per_token,
        "itl": lambda sample: percentile(sample.gaps_s, 99),
        "e2e": lambda sample: sample.total_s,
    }
)
_LIMIT = re.compile(r"(\w+)=(\d+(?:\.\d+)?|\.\d+)(ms|s)")
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclasses.dataclass(frozen=True, slots=True)
class Slo:
    """Limits by name, in seconds; at least one."""

    limits: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=200ms,itl=50ms,e2e=3s`. Raises UsageError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            match = _LIMIT.fullmatch(part.strip())
            if match is None:
                raise UsageError(f"--slo {part.strip()!r}: write NAME=TIME with a unit, such as ttft=200ms or e2e=3s")
            name, value, unit = match.groups()
            if name not in TIMES:
                raise UsageError(f"--slo {name!r}: not one of {', '.join(TIMES)}")
            if name in limits:
                raise UsageError(f"--slo {name!r}: given twice")
            limits[name] = float(value) * _UNITS[unit]
        return cls(MappingProxyType(limits))

    def missed(self, sample: Sample) -> tuple[str, ...]:
        """Names of the limits that a request which succeeded did not meet."""
        times = {name: TIMES[name](sample) for name in self.limits}
        return tuple(name for name, time in times.items() if time is not None and time > self.limits[name])

    def is_met(self, sample: Sample) -> bool:
        return sample.ok and not self.missed(sample)


def goodput(samples: Sequence[Sample], slo: Slo, seconds: float) -> dict[str, Any]:
    """Share and rate of the requests that met the objective. seconds: the time in which they arrived.

    `missed` counts requests for each limit; one request may miss several.
    """
    good = sum(slo.is_met(sample) for sample in samples)
    missed = [name for sample in samples if sample.ok for name in slo.missed(sample)]
    return {
        "slo_ms": {name: 1e3 * limit for name, limit in slo.limits.items()},
        "requests": len(samples),
        "good": good,
        "share": good / len(samples) if samples else None,
        "requests_per_s": good / seconds if seconds else None,
        "missed": {name: missed.count(name) for name in slo.limits},
        "failed": sum(not sample.ok for sample in samples),
    }
