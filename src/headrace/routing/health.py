"""Whether a replica is well, from three sources. Pure; times are handed in.

- **probes**: ``unhealthy_after`` in a row that fail make it sick, ``healthy_after`` that succeed make it well again.
- **results**: ``failures`` requests in a row that fail (no connection, broken off, 5xx, too slow, junk; never what a
  client did wrong, never "no room") send it away for ``rest_s``; then one request tries it. Each time that fails the
  rest is twice as long, up to ``max_rest_s``: a probe that answers is no proof that the engine behind it works.
- **progress**: a replica that has begun streams, none of which got a token for ``progress_s``, is sick whatever its
  probe says, until a token comes or its rest is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HealthCause = Literal["starting", "probe", "results", "progress"]


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Counts, and seconds."""

    unhealthy_after: int = 2
    healthy_after: int = 1
    failures: int = 3
    rest_s: float = 3.0
    max_rest_s: float = 12.0
    progress_s: float = 10.0


class Health:
    """One replica's. It begins as not well: the first probe that succeeds makes it well."""

    __slots__ = (
        "_bad_probes",
        "_failed_results",
        "_good_probes",
        "_probed_well",
        "_progress_s",
        "_rest_s",
        "_resting_for",
        "_rests_to_s",
        "_trial",
        "settings",
    )

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self._probed_well = False
        self._good_probes = 0
        self._bad_probes = 0
        self._failed_results = 0
        self._rest_s = settings.rest_s
        self._rests_to_s: float | None = None
        self._resting_for: HealthCause = "results"
        self._trial = False
        self._progress_s: float | None = None

    def cause(self, now_s: float) -> HealthCause | None:
        """Why no request may go to it now; None when one may."""
        if not self._probed_well:
            return "probe" if self._bad_probes else "starting"
        if self._rests_to_s is not None and (now_s < self._rests_to_s or self._trial):
            return self._resting_for
        return None

    def healthy(self, now_s: float) -> bool:
        """Whether requests may go to it; after a rest, one."""
        return self.cause(now_s) is None

    def probed(self, well: bool) -> None:
        """An active probe ended."""
        settings = self.settings
        if well:
            self._bad_probes = 0
            self._good_probes += 1
            if self._good_probes >= settings.healthy_after:
                self._probed_well = True
        else:
            self._good_probes = 0
            self._bad_probes += 1
            if self._bad_probes >= settings.unhealthy_after:
                self._probed_well = False

    def sent(self, now_s: float) -> None:
        """A request goes to it. After a rest the first one is a trial: no other until it has ended."""
        if self._rests_to_s is not None and now_s >= self._rests_to_s:
            self._trial = True

    def succeeded(self) -> None:
        """A request got an answer that shows a working engine."""
        self._failed_results = 0
        self._trial = False
        self._rests_to_s = None
        self._rest_s = self.settings.rest_s

    def failed(self, now_s: float) -> None:
        """A request failed, and not by its client's fault."""
        self._failed_results += 1
        if self._trial or self._failed_results >= self.settings.failures:
            self._rest(now_s, "results")

    def undecided(self) -> None:
        """A request ended without telling anything: its client went away, or had asked for something wrong."""
        self._trial = False

    def progressed(self, now_s: float, *, began: bool = False) -> None:
        """A token came."""
        self._progress_s = now_s
        if self._resting_for == "progress" and self._rests_to_s is not None and not began:
            self._rests_to_s = None
            self._trial = False

    def watch(self, now_s: float, streaming: int) -> bool:
        """Look whether ``streaming`` begun streams make progress. True when it has just been found that they do not."""
        if streaming == 0 or self._progress_s is None:
            self._progress_s = now_s
            return False
        if now_s - self._progress_s < self.settings.progress_s:
            return False
        self._progress_s = now_s
        self._rest(now_s, "progress")
        return True

    def _rest(self, now_s: float, cause: HealthCause) -> None:
        self._rests_to_s = now_s + self._rest_s
        self._resting_for = cause
        self._rest_s = min(self.settings.max_rest_s, self._rest_s * 2)
        self._failed_results = 0
        self._trial = False
