"""When to stop believing that a failed step is the fault of its requests. No torch.

One request that cannot be computed ends alone. A device that is lost fails every step: then the process has to go, so
that its supervisor starts another.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from specd.errors import EngineError

_MOST, _WINDOW_S = 3, 60.0


class FailureLimit:
    """Counts steps of which not one row could be computed, since the last step of which one could."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: collections.deque[float] = collections.deque(maxlen=_MOST)

    def note(self, *, computed: bool) -> None:
        """One step is over. Raises EngineError at the third within a minute of which nothing was computed."""
        if computed:
            self._times.clear()
            return
        self._times.append(self._clock())
        if len(self._times) == _MOST and self._times[-1] - self._times[0] <= _WINDOW_S:
            raise EngineError(f"{_MOST} steps within {_WINDOW_S:g} s failed for every request, and none was computed")
