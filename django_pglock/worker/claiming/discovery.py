"""Discovery: imports the functions of ready tasks that this process does not know yet."""

from __future__ import annotations

import math
import time

from django_pglock.store.ready import ready_paths
from django_pglock.tasks import registry
from django_pglock.tasks.registry import import_function
from django_pglock.worker.claiming.queues import Queues

#: Seconds between two checks while tasks are ready that this process cannot claim, and while it has other work.
CHECK_INTERVAL, BUSY_CHECK_INTERVAL = 1.0, 30.0


class Discovery:
    """Imports the modules that ready tasks of the served queues name, if ``tasks/registry.py`` allows them."""

    def __init__(self, using: str, queues: Queues) -> None:
        self.using = using
        self.queues = queues
        self._checked_at = float("-inf")
        # Whether a check was refused because the previous one was just before.
        self._is_owed = False

    @property
    def is_due(self) -> bool:
        """Whether it is time to check although there is other work."""
        return time.monotonic() - self._checked_at >= BUSY_CHECK_INTERVAL

    @property
    def next_in(self) -> float:
        """Seconds until the check that was refused; infinity: none was."""
        return max(0.0, self._checked_at + CHECK_INTERVAL - time.monotonic()) if self._is_owed else math.inf

    def check(self, *, is_urgent: bool = False) -> bool:
        """Check, unless the last check was less than ``CHECK_INTERVAL`` ago. Return whether functions were found.

        With ``is_urgent``, check in any case.
        """
        self._is_owed = not is_urgent and time.monotonic() - self._checked_at < CHECK_INTERVAL
        if self._is_owed:
            return False
        self._checked_at = time.monotonic()
        served = {path for queue, path in ready_paths(self.using) if self.queues.serves(queue)}
        unknown = [path for path in sorted(served) if registry.find(path) is None]
        found = [path for path in unknown if import_function(path)]
        return bool(found)
