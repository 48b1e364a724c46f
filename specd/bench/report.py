"""Samples to figures. Times in the report are milliseconds, rates tokens a second."""

from __future__ import annotations

import collections
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specd.bench.client import UNFINISHED, Sample

MIN_ROUNDS = 5  # fewer rounds give no median worth the name


def percentile(values: Iterable[float], q: float) -> float | None:
    """Linear interpolation between closest ranks; None for nothing. q in 0..100."""
    ordered = sorted(values)
    if not ordered:
        return None
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(samples: Sequence[Sample], wall_s: float) -> dict[str, Any]:
    """Figures over the samples that succeeded. tokens_per_s is the aggregate over wall_s."""
    good = [sample for sample in samples if sample.ok]
    tokens = sum(sample.completion_tokens for sample in good)
    steps = sum(sample.num_spec_steps for sample in good)
    drafted = sum(sample.num_draft_tokens for sample in good)
    accepted = sum(sample.num_accepted_tokens for sample in good)
    rates = [rate for sample in good if (rate := sample.decode_tokens_per_s) is not None]
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors_by_kind": dict(collections.Counter(sample.kind for sample in samples if not sample.ok)),
        "errors": sorted({sample.error for sample in samples if not sample.ok})[:5],
        "retry_after_s": _extremes([s.retry_after_s for s in samples if s.retry_after_s is not None]),
        "wall_s": wall_s,
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "completion_tokens": tokens,
        "tokens_per_s": tokens / wall_s if wall_s else None,
        "decode_tokens_per_s_p50": percentile(rates, 50),
        "ttft_ms": _spread([ttft for sample in good if (ttft := sample.ttft_s) is not None]),
        "itl_ms": _spread([gap for sample in good for gap in sample.gaps_s]),
        "total_ms": _spread([sample.total_s for sample in good]),
        "late_ms": _spread([sample.late_s for sample in samples]),
        "acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "draft_steps": steps,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    values = [1e3 * value for value in seconds]
    return {"p50": percentile(values, 50), "p90": percentile(values, 90), "p99": percentile(values, 99)}


def _extremes(values: Sequence[float]) -> dict[str, float] | None:
    return {"least": min(values), "most": max(values)} if values else None


def compare(rounds: Sequence[dict[str, dict[str, Any]]], samples: Sequence[tuple[Sample, Sample]]) -> dict[str, Any]:
    """rounds: {"auto": summary, "off": summary} each; samples: (auto, off) of the same prompt.

    A ratio is auto / off within one round, so that drift of the machine cancels; the median over rounds is reported,
    with the quartiles. Throughput above 1 and latency below 1 are gains.
    """
    ratios = {
        "tokens_per_s": [_ratio(r, "tokens_per_s") for r in rounds],
        "decode_tokens_per_s": [_ratio(r, "decode_tokens_per_s_p50") for r in rounds],
        "ttft": [_ratio(r, "ttft_ms", "p50") for r in rounds],
        "itl_p50": [_ratio(r, "itl_ms", "p50") for r in rounds],
        "itl_p99": [_ratio(r, "itl_ms", "p99") for r in rounds],
    }
    both = [(auto, off) for auto, off in samples if auto.ok and off.ok]
    return {
        "rounds": len(rounds),
        "ratios": {name: _median([v for v in values if v is not None]) for name, values in ratios.items()},
        "identical_texts": sum(auto.text == off.text for auto, off in both),
        "compared_texts": len(both),
    }


def _ratio(pair: dict[str, dict[str, Any]], *path: str) -> float | None:
    values: list[Any] = [pair["auto"], pair["off"]]
    for name in path:
        values = [value[name] for value in values]
    auto, off = values
    return auto / off if auto is not None and off else None


def _median(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "p25": None, "p75": None}
    return {"median": statistics.median(values), "p25": percentile(values, 25), "p75": percentile(values, 75)}


def machine() -> dict[str, Any]:
    """What the client ran on; with a local server, what the server ran on too."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [_line(name, summary) for name, summary in report["summary"].items()]
    for summary in report["summary"].values():
        lines += [f"  {count} failed: {kind}" for kind, count in summary["errors_by_kind"].items()]
        lines += [f"  failed: {error}" for error in summary["errors"]]
    if "search" in report:
        lines.append(_search(report["search"]))
    if "compare" in report:
        result = report["compare"]
        lines.append(f"speculation on / off, median of {result['rounds']} rounds (p25 to p75):")
        for name, value in result["ratios"].items():
            lines.append(
                f"  {name:<20} {_number(value['median'])}  ({_number(value['p25'])} to {_number(value['p75'])})"
            )
        lines.append(f"  identical texts      {result['identical_texts']} of {result['compared_texts']}")
    return "\n".join(lines)


def _line(name: str, summary: dict[str, Any]) -> str:
    done = summary["requests"] - summary["failed"]
    ttft, itl = summary["ttft_ms"], summary["itl_ms"]
    return (
        f"speculation {name}: {done} requests done, {summary['failed']} failed\n"
        f"  tokens/s             {_number(summary['tokens_per_s'])} in all, "
        f"{_number(summary['decode_tokens_per_s_p50'])} decoding (p50 of requests)\n"
        f"  TTFT ms              p50 {_number(ttft['p50'])}, p99 {_number(ttft['p99'])}\n"
        f"  ITL ms               p50 {_number(itl['p50'])}, p99 {_number(itl['p99'])}\n"
        f"  acceptance length    {_number(summary['acceptance_length'])}" + _goodput(summary)
    )


def _goodput(summary: dict[str, Any]) -> str:
    if "goodput" not in summary:
        return ""
    found = summary["goodput"]
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in found["slo_ms"].items())
    missed = ", ".join(f"{count} missed {name}" for name, count in found["missed"].items() if count)
    rate, good_rate = _number(summary["requests_per_s"]), _number(found["requests_per_s"])
    return (
        f"\n  requests/s           {rate} in all, {good_rate} good"
        f"\n  goodput              {_percent(found['share'])}: {found['good']} of {found['requests']} within {limits}"
        + (f"; {missed}" if missed else "")
    )


def _search(found: dict[str, Any]) -> str:
    lines = [f"requests/s at which {_percent(found['target'])} meet the objective:"]
    for trial in found["trials"]:
        figures = trial["figures"]
        state = "holds" if trial["holds"] else "given up" if figures["unsent"] else "does not hold"
        good = figures["goodput"]
        late = figures["errors_by_kind"].get(UNFINISHED, 0)
        words = f", {late} unfinished" if late else ""
        lines.append(f"  {_number(trial['rate']):>8}  {state}, {good['good']} of {good['requests']} good{words}")
    rate, limit = found["rate"], found["limit"]
    end = "" if found["complete"] else "; the rest of --search-time was too short for another trial"
    above = "nothing higher was tried" if limit is None else f"{_number(limit)} does not hold"
    lines.append(f"found: {'none' if rate is None else _number(rate)} ({above}{end})")
    if rate is None and (late := _cut_off(found)):
        lines.append(f"--grace-period is too short: at {_number(late)} requests/s what had not ended in it decided")
    return "\n".join(lines)


def _cut_off(found: dict[str, Any]) -> float | None:
    """The lowest rate that was tried, if with more time for what was unfinished it might have held."""
    trial = min(found["trials"], key=lambda trial: trial["rate"], default=None)
    if trial is None:
        return None
    good, late = trial["figures"]["goodput"], trial["figures"]["errors_by_kind"].get(UNFINISHED, 0)
    might = good["good"] + late >= found["target"] * good["requests"]
    return float(trial["rate"]) if late and might else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
