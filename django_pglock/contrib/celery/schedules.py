"""``crontab`` and ``schedule`` of Celery as data: an expression of cron, or a time between two runs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any


class crontab:  # noqa: N801 - Celery's name
    """The fields of cron, as ``crontab(minute=0, hour="*/3")``; ``expression`` is ``"0 */3 * * *"``."""

    def __init__(
        self,
        minute: Any = "*",
        hour: Any = "*",
        day_of_week: Any = "*",
        day_of_month: Any = "*",
        month_of_year: Any = "*",
        **ignored: Any,
    ) -> None:
        self.expression = " ".join(map(_field, (minute, hour, day_of_month, month_of_year, day_of_week)))

    def __repr__(self) -> str:
        return f"<crontab: {self.expression}>"


class schedule:  # noqa: N801
    """A time between two runs, in seconds or as a timedelta."""

    def __init__(self, run_every: float | timedelta, **ignored: Any) -> None:
        self.run_every = run_every if isinstance(run_every, timedelta) else timedelta(seconds=run_every)


def _field(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(str(each) for each in sorted(value))
    return str(value).replace(" ", "")
