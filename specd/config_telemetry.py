"""Settings of the spans (`server/telemetry.py`): a section of `Config`. No torch, no I/O."""

from __future__ import annotations

import dataclasses

from specd.config_options import check_endpoint, check_service_name, option


@dataclasses.dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """OpenTelemetry spans of requests; needs the extra `otel`."""

    enabled: bool = option(False, "Whether spans are made and sent: times, counts and settings, never any text.")
    endpoint: str = option(
        "http://127.0.0.1:4318/v1/traces", "Where a collector takes OTLP over HTTP.", check=check_endpoint
    )
    service_name: str = option("specd", "The resource's service.name.", check=check_service_name)
    sample_ratio: float = option(
        1.0,
        "Share of the traces that begin here; one that came with a traceparent is as its caller decided.",
        low=0.0,
        high=1.0,
    )
    decode_event_steps: int = option(
        32, "Steps of a choice between two events of the decode span.", unit="steps", low=1, high=1 << 20
    )
    max_queued: int = option(
        2048, "Spans that wait to be sent, beyond them they are dropped and counted.", unit="spans", low=8, high=1 << 20
    )
