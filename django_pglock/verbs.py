"""The verbs that users apply to tasks in the admin and with ``locktasks``: permissions, statuses and messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from django.utils.text import get_text_list
from django.utils.translation import gettext_lazy, ngettext

from django_pglock.store.cancel import cancellable
from django_pglock.store.count import MOST_COUNTED
from django_pglock.store.move_to_status import check_target, movable_to
from django_pglock.store.prune import deletable
from django_pglock.store.reset_stuck import stuck
from django_pglock.store.retry import has_taken_key, left_cancelled, retriable
from django_pglock.tasks.states import FINISHED, WAITING, TaskStatus

#: Called after each window of rows with the number of rows changed so far and the last id examined.
Progress = Callable[[int, int], None]

#: Returns the translated text about a number of rows, with places for ``%(count)s`` and ``%(statuses)s``. A function,
#: because a lazy text with a plural takes 30 kB of memory.
Message = Callable[[int], str]


#: At most this number of the tasks that stay cancelled is named.
MOST_NAMED = 10


def _not_changed(number: int) -> str:
    return ngettext(
        "%(count)s of the selected tasks was not changed, because of its status, or because its worker is storing its "
        "outcome. This action changes only tasks whose status is %(statuses)s.",
        "%(count)s of the selected tasks were not changed, because of their status, or because workers are storing "
        "their outcomes. This action changes only tasks whose status is %(statuses)s.",
        number,
    )


def _no_question(number: int) -> str:
    return ""


@dataclass(frozen=True)
class Verb:
    """A change that users may apply to rows."""

    name: str
    #: The permission is ``django_pglock.<permission>_<model>``.
    permission: str
    #: The name of the action on a list page, and of the button on the page of one row. Empty: there is no button.
    label: Any
    button: Any
    #: The statuses in which a row can be changed. The page of a row in another status has no button.
    statuses: frozenset[str]
    #: Changes the rows of a queryset with guarded statements and returns the number of changed rows.
    apply: Callable[[Any, Progress | None], int]
    #: The message about the rows that were changed.
    done: Message
    #: The message about selected rows that were not changed.
    unchanged: Message = _not_changed
    #: Shown by ``locktasks`` and by the admin before they ask for confirmation.
    question: Message = _no_question
    #: Returns those rows of a queryset that ``apply`` would change now; None: those in one of ``statuses``.
    selection: Callable[[Any], Any] | None = None
    #: Whether to begin with the newest rows.
    newest_first: bool = False
    #: The label of the value that the verb needs besides the rows; empty if it needs none.
    value_label: Any = ""
    value: str = ""

    def with_value(self, using: str, value: str) -> Verb:
        """Return the verb with the value that it needs. Raises ``ValueError`` for a wrong one."""
        return self

    def message(self, text: Message, number: int, *, most: int | None = None) -> str:
        """Return the text about a number of rows; ``most`` is the number at which counting stops."""
        count = str(number) if most is None or number <= most else f"{most}+"
        labels = [str(TaskStatus(each).label) for each in sorted(self.statuses)]
        return text(number) % {"count": count, "statuses": get_text_list(labels)}

    def remark(self, rows: Any) -> str:
        """Return what else a person should know before these rows are changed; mostly an empty string."""
        return ""

    def left_out(self, rows: Any) -> tuple[int, str]:
        """Return how many of these rows were not changed although their status allows it, and why; mostly none."""
        return 0, ""

    def movable(self, rows: Any) -> Any:
        """Return the rows that the verb would change now."""
        return rows.filter(status__in=sorted(self.statuses)) if self.selection is None else self.selection(rows)


def _would_be_moved(number: int) -> str:
    return ngettext("%(count)s waiting task would be moved.", "%(count)s waiting tasks would be moved.", number)


class RetryVerb(Verb):
    """Retries tasks, and says which others stay cancelled: those that were to run after them."""

    def remark(self, rows: Any) -> str:
        """Return which tasks stay cancelled; an empty string if there are none."""
        left = left_cancelled(rows)
        if not left:
            return ""
        text = ngettext(
            "%(count)d task stays cancelled, because it was to run after one of these: %(tasks)s. Retry it as well.",
            "%(count)d tasks stay cancelled, because they were to run after one of these: %(tasks)s. Retry them as "
            "well.",
            len(left),
        )
        some = [f"#{each}" for each in left[:MOST_NAMED]]
        return text % {"count": len(left), "tasks": ", ".join(some) + (" …" if len(left) > MOST_NAMED else "")}

    def left_out(self, rows: Any) -> tuple[int, str]:
        """Return how many tasks could not be retried because of their unique keys, and a sentence about them."""
        count = has_taken_key(rows)[: MOST_COUNTED + 1].count()
        text = ngettext(
            "%(count)s task was left out, because another task has its unique key.",
            "%(count)s tasks were left out, because other tasks have their unique keys.",
            count,
        )
        return count, self.message(lambda number: text, count, most=MOST_COUNTED) if count else ""


class MoveVerb(Verb):
    """Moves tasks to the queue that is the value of the verb."""

    def with_value(self, using: str, value: str) -> Verb:
        """Return the verb with the name of the queue. Raises ``ValueError`` for a wrong one."""
        check_target(using, value)
        return replace(
            self,
            value=value,
            apply=lambda rows, progress: rows.move_to_queue(value, progress=progress),
            selection=lambda rows: movable_to(rows, value),
            question=_would_be_moved,
        )


def _needs_value(rows: Any, progress: Progress | None) -> int:
    raise ValueError("Call with_value() first.")


TASK_VERBS = {
    verb.name: verb
    for verb in (
        Verb(
            name="reset_stuck",
            permission="reset",
            label=gettext_lazy("Reset stuck tasks"),
            button=gettext_lazy("Reset"),
            statuses=frozenset({TaskStatus.RUNNING.value}),
            apply=lambda rows, progress: rows.reset_stuck(),
            selection=stuck,
            done=lambda number: ngettext(
                "%(count)s stuck task is ready again.", "%(count)s stuck tasks are ready again.", number
            ),
            unchanged=lambda number: ngettext(
                "%(count)s of the selected tasks was not changed: its worker is alive, or the task no longer runs.",
                "%(count)s of the selected tasks were not changed: their workers are alive, or the tasks no longer "
                "run.",
                number,
            ),
            question=lambda number: ngettext(
                "%(count)s stuck task would be reset.", "%(count)s stuck tasks would be reset.", number
            ),
        ),
        RetryVerb(
            name="retry",
            permission="retry",
            label=gettext_lazy("Retry failed or cancelled tasks"),
            button=gettext_lazy("Retry"),
            statuses=frozenset({TaskStatus.FAILED.value, TaskStatus.CANCELLED.value}),
            apply=lambda rows, progress: rows.retry(progress=progress),
            selection=retriable,
            done=lambda number: ngettext("%(count)s task will run again.", "%(count)s tasks will run again.", number),
            question=lambda number: ngettext(
                "%(count)s task would run again.", "%(count)s tasks would run again.", number
            ),
        ),
        Verb(
            name="discard",
            permission="cancel",
            label=gettext_lazy("Discard failed tasks"),
            button=gettext_lazy("Discard"),
            statuses=frozenset({TaskStatus.FAILED.value}),
            apply=lambda rows, progress: rows.discard(progress=progress),
            done=lambda number: ngettext(
                "%(count)s failed task was cancelled.", "%(count)s failed tasks were cancelled.", number
            ),
            question=lambda number: ngettext(
                "%(count)s failed task would be cancelled. It would no longer be among the failures.",
                "%(count)s failed tasks would be cancelled. They would no longer be among the failures.",
                number,
            ),
        ),
        Verb(
            name="run_now",
            permission="retry",
            label=gettext_lazy("Run scheduled tasks now"),
            button=gettext_lazy("Run now"),
            statuses=frozenset({TaskStatus.SCHEDULED.value}),
            apply=lambda rows, progress: rows.run_now(progress=progress),
            done=lambda number: ngettext("%(count)s task will run now.", "%(count)s tasks will run now.", number),
            question=lambda number: ngettext("%(count)s task would run now.", "%(count)s tasks would run now.", number),
        ),
        Verb(
            name="cancel",
            permission="cancel",
            label=gettext_lazy("Cancel tasks"),
            button=gettext_lazy("Cancel"),
            statuses=frozenset({*WAITING, TaskStatus.RUNNING.value}),
            apply=lambda rows, progress: rows.cancel(progress=progress),
            selection=cancellable,
            done=lambda number: ngettext(
                "%(count)s task was cancelled, or asked to end if it runs.",
                "%(count)s tasks were cancelled, or asked to end if they run.",
                number,
            ),
            question=lambda number: ngettext(
                "%(count)s task would be cancelled, or asked to end if it runs.",
                "%(count)s tasks would be cancelled, or asked to end if they run.",
                number,
            ),
            newest_first=True,
        ),
        MoveVerb(
            name="move_to_queue",
            permission="move",
            label=gettext_lazy("Move waiting tasks to another queue"),
            button="",
            statuses=WAITING,
            apply=_needs_value,
            done=lambda number: ngettext("%(count)s task was moved.", "%(count)s tasks were moved.", number),
            unchanged=lambda number: ngettext(
                "%(count)s of the selected tasks was not moved: it does not wait, or is in this queue already.",
                "%(count)s of the selected tasks were not moved: they do not wait, or are in this queue already.",
                number,
            ),
            # Until the queue is known.
            question=lambda number: ngettext(
                "%(count)s waiting task would be moved, unless it is in that queue already.",
                "%(count)s waiting tasks would be moved, except those that are in that queue already.",
                number,
            ),
            value_label=gettext_lazy("Queue"),
        ),
        Verb(
            name="delete_finished",
            permission="delete",
            label=gettext_lazy("Delete finished tasks"),
            # Django's own page deletes one.
            button="",
            statuses=FINISHED,
            apply=lambda rows, progress: rows.delete_finished(progress=progress),
            selection=deletable,
            done=lambda number: ngettext("%(count)s task was deleted.", "%(count)s tasks were deleted.", number),
            unchanged=lambda number: ngettext(
                "%(count)s of the selected tasks was not deleted: it is not finished, or is still needed.",
                "%(count)s of the selected tasks were not deleted: they are not finished, or are still needed.",
                number,
            ),
            question=lambda number: ngettext(
                "%(count)s finished task would be deleted, with its attempts. This cannot be undone.",
                "%(count)s finished tasks would be deleted, with their attempts. This cannot be undone.",
                number,
            ),
        ),
    )
}
