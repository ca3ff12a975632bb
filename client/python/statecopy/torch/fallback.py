"""Going on while the daemon is away, where its user chose that: copies are then done in this process.

    served --UNAVAILABLE, and nothing may run any more--> away --a call is answered--> served

Only UNAVAILABLE leads away, never a refusal, and only once no copy that was accepted can still move bytes: each was
answered, or its executor is known dead. A daemon that drains is waited for, until it is away or another one serves.
While it is away one call in a while asks for it; the others do not.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import torch

from statecopy.errors import Error, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from statecopy import _core

    Result = TypeVar("Result")

logger = logging.getLogger("statecopy.torch")

# An absent daemon is asked for at most so often.
ASK_EVERY_S = 1.0
# Steps of the waits for an executor's end, and for a daemon that drains.
STEP_S = 0.001
DRAIN_STEP_S = 0.02


class Fallback:
    """The fallback of one client: whether its daemon is away, since when, and how often it was done without."""

    def __init__(self, core: _core.Client, timeout_s: float) -> None:
        self._core = core
        self._timeout_s = timeout_s
        self._changing = threading.Lock()
        self._away = False
        self._ask_at = 0.0
        self._local_since = 0
        self._counters = {"local_gathers": 0, "local_scatters": 0, "outages": 0}

    def run(self, counter: str, ask: Callable[[], Result], local: Callable[[], Result]) -> Result:
        """What the daemon answers, or the local copy's result. Its errors are raised, but for its absence."""
        deadline = time.monotonic() + self._timeout_s
        while not self._away or self._core.closed or self._is_due():
            was_away = self._away
            try:
                answer = ask()
            except Unavailable as error:
                if error.about in ("stream", "graph"):
                    # An earlier copy was lost: its rows are for the user to write again.
                    raise
                if self._is_draining(error, deadline):
                    time.sleep(DRAIN_STEP_S)
                    continue
                self._require_quiet(error, deadline)
                self._leave(error)
                break
            # An answer to what was asked before the daemon went away tells nothing of now.
            if was_away:
                self._come_back()
            return answer
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            # Every replay would copy in this process, also once the daemon is back, and by the addresses of now.
            raise Unavailable(
                "The daemon is away while the current stream is captured; a copy of this process is not captured",
                code="UNAVAILABLE",
                remedy="Capture the graph again once the daemon is back.",
                about="graph",
            )
        # Calls that do not ask hear of a copy that their stream lost, too.
        self._core._check_stream()
        result = local()
        with self._changing:
            self._counters[counter] += 1
            self._local_since += 1
        return result

    def answered(self) -> None:
        """The daemon answered another call than a copy: an outage is over."""
        if self._away:
            self._come_back()

    def counters(self) -> dict[str, int]:
        """``local_gathers``, ``local_scatters`` and ``outages`` since the client connected."""
        with self._changing:
            return dict(self._counters)

    def _is_due(self) -> bool:
        """Whether this call is to ask for the absent daemon: one in a while, whatever the number of threads."""
        if time.monotonic() < self._ask_at:
            return False
        with self._changing:
            now = time.monotonic()
            if now < self._ask_at:
                return False
            self._ask_at = now + ASK_EVERY_S
            return True

    def _is_draining(self, error: Error, deadline: float) -> bool:
        """Whether to wait for what comes after a drain; raises the daemon's refusal when that takes too long."""
        if error.code == "UNAVAILABLE":
            return False
        if error.code != "DRAINING" or time.monotonic() >= deadline:
            raise error
        return True

    def _require_quiet(self, error: Error, deadline: float) -> None:
        """Waits until nothing that was accepted can run any more; raises the error when that is not known in time."""
        while self._core.has_stray_copies():
            if time.monotonic() >= deadline:
                raise error
            time.sleep(STEP_S)

    def _leave(self, error: Error) -> None:
        with self._changing:
            self._ask_at = time.monotonic() + ASK_EVERY_S
            if self._away:
                return
            self._away = True
            self._counters["outages"] += 1
            self._local_since = 0
        logger.warning("The daemon is away; copies are made in this process until it is back: %s", error)

    def _come_back(self) -> None:
        with self._changing:
            if not self._away:
                return
            self._away = False
            copies = self._local_since
        logger.warning("The daemon is back after %d copies in this process", copies)
