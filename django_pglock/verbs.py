"""What people may ask of tasks, in the admin and with ``locktasks``: which tasks each verb moves, and its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_lazy, ngettext_lazy

from django_pglock.tasks.states import WAITING, TaskStatus

#: Called now and then with the number of rows moved so far and the last id looked at.
Progress = Callable[[int, int], None]

_LEFT_ALONE = ngettext_lazy(
    "%(count)s of the chosen tasks was left alone: it is in another state by now, or being settled.",
    "%(count)s of the chosen tasks were left alone: they are in another state by now, or being settled.",
    "number",
)


@dataclass(frozen=True)
class Verb:
    """One thing that a person may ask of rows. Messages take ``count``, a text, and ``number``, for the plural."""

    name: str
    #: The permission is ``django_pglock.<permission>_<model>``.
    permission: str
    #: The name of the action on a list page, and of the button on the page of one row.
    label: Any
    button: Any
    #: The statuses that the verb leads out of; a row in another one has no button.
    statuses: frozenset[str]
    #: Moves the rows of a queryset with guarded statements and returns how many were moved.
    apply: Callable[[Any, Progress | None], int]
    done: Any
    #: About rows that were chosen and not moved.
    left: Any = _LEFT_ALONE
    #: Asked before the verb is applied to a selection.
    question: Any = ""

    def said(self, message: Any, number: int, *, most: int | None = None) -> str:
        """Return a message about so many rows; ``most`` is where the count stopped."""
        count = str(number) if most is None or number <= most else f"{most}+"
        return str(message % {"count": count, "number": number})

    def movable(self, rows: Any) -> Any:
        """Return the rows that the verb would move now."""
        return rows.filter(status__in=sorted(self.statuses))


class ResetVerb(Verb):
    """Moves running tasks, but only those whose worker is gone."""

    def movable(self, rows: Any) -> Any:
        """Return the rows that the verb would move now."""
        return rows.stuck()


TASK_VERBS = {
    verb.name: verb
    for verb in (
        ResetVerb(
            "reset_stuck",
            "reset",
            gettext_lazy("Reset stuck tasks"),
            gettext_lazy("Reset"),
            frozenset({TaskStatus.RUNNING.value}),
            lambda rows, progress: rows.reset_stuck(),
            ngettext_lazy("%(count)s stuck task is ready again.", "%(count)s stuck tasks are ready again.", "number"),
            ngettext_lazy(
                "%(count)s of the chosen tasks was left alone: its worker is alive, or it no longer runs.",
                "%(count)s of the chosen tasks were left alone: their workers are alive, or they no longer run.",
                "number",
            ),
            ngettext_lazy("%(count)s stuck task would be reset.", "%(count)s stuck tasks would be reset.", "number"),
        ),
        Verb(
            "retry",
            "retry",
            gettext_lazy("Retry failed or cancelled tasks"),
            gettext_lazy("Retry"),
            frozenset({TaskStatus.FAILED.value, TaskStatus.CANCELLED.value}),
            lambda rows, progress: rows.retry(progress=progress),
            ngettext_lazy("%(count)s task will run again.", "%(count)s tasks will run again.", "number"),
            question=ngettext_lazy("%(count)s task would run again.", "%(count)s tasks would run again.", "number"),
        ),
        Verb(
            "run_now",
            "retry",
            gettext_lazy("Run scheduled tasks now"),
            gettext_lazy("Run now"),
            frozenset({TaskStatus.SCHEDULED.value}),
            lambda rows, progress: rows.run_now(progress=progress),
            ngettext_lazy("%(count)s task runs before its time.", "%(count)s tasks run before their time.", "number"),
            question=ngettext_lazy(
                "%(count)s task would run before its time.", "%(count)s tasks would run before their time.", "number"
            ),
        ),
        Verb(
            "cancel",
            "cancel",
            gettext_lazy("Cancel tasks"),
            gettext_lazy("Cancel"),
            frozenset({*WAITING, TaskStatus.RUNNING.value}),
            lambda rows, progress: rows.cancel(progress=progress),
            ngettext_lazy(
                "%(count)s task was cancelled, or asked to end if it runs.",
                "%(count)s tasks were cancelled, or asked to end if they run.",
                "number",
            ),
            question=ngettext_lazy(
                "%(count)s task would be cancelled, or asked to end if it runs.",
                "%(count)s tasks would be cancelled, or asked to end if they run.",
                "number",
            ),
        ),
    )
}
