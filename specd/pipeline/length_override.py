"""How many drafts a step makes, changed while the daemon runs. No torch."""

from __future__ import annotations

from specd.config import Config
from specd.errors import RequestError
from specd.pipeline.draft_length import AdaptiveLength, FixedLength
from specd.pipeline.schedule import Scheduler
from specd.status import EngineInfo, LengthPolicy


class LengthOverride:
    """An operator's wish instead of `speculation.draft_len`. The text does not change: see `draft_length`."""

    def __init__(self, scheduler: Scheduler, config: Config, info: EngineInfo) -> None:
        self._scheduler = scheduler
        self._limits = config.scheduler
        self._configured = config.speculation.draft_len if info.max_draft else 0
        self._max_draft = info.max_draft
        self._wish: int | str | None = None

    @property
    def policy(self) -> LengthPolicy:
        k = self._configured if self._wish is None else self._wish
        return LengthPolicy("auto" if k else "off", k, self._configured, self._wish is not None)

    def set(self, k: int | str | None) -> None:
        """A number, "adaptive", or None: as configured. Raises RequestError."""
        if isinstance(k, int):
            self._check(k)
            self._scheduler.override_length(FixedLength(k), pad=k > 0)
        elif k == "adaptive" and self._configured != "adaptive":
            if not self._max_draft:
                raise RequestError("k: there is no drafter (speculation.draft)", code="no_drafter", param="k")
            self._scheduler.override_length(AdaptiveLength())
        else:  # the configured policy is adaptive: it has learnt something already
            self._scheduler.override_length(None)
        self._wish = k

    def _check(self, k: int) -> None:
        if k and not self._max_draft:
            raise RequestError(f"k = {k}: there is no drafter (speculation.draft)", code="no_drafter", param="k")
        if not 0 <= k <= self._max_draft:
            raise RequestError(f"k = {k}: must be in 0..{self._max_draft}", code="out_of_range", param="k")
        needed = self._limits.max_running * (1 + k)
        if k and needed > self._limits.max_tokens:
            raise RequestError(
                f"k = {k}: {self._limits.max_running} sequences need {needed} tokens a step, "
                f"scheduler.max_tokens is {self._limits.max_tokens}",
                code="out_of_range",
                param="k",
            )
