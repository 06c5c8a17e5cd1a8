"""The reason why a waiting task does not run, as a sentence for the admin and ``locktasks``."""

from __future__ import annotations

from collections.abc import Iterable

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.models import Task
from django_pglock.store.admit import holders
from django_pglock.store.why_unfinished import Obstacle, why_unfinished
from django_pglock.tasks.call_keys import GROUPED, RATED
from django_pglock.tasks.redaction import shown
from django_pglock.tasks.states import TaskStatus

#: At most this number of the tasks for which a task waits is named.
FEW = 5


def why_it_waits(task: Task, using: str) -> str:
    """Return the reason why a task waits, apart from the order of the queue; an empty string if there is none."""
    if task.status == TaskStatus.READY:
        return _why_no_worker_runs(task, using)
    if task.status != TaskStatus.BLOCKED:
        return ""
    if task.waits_for:
        awaited = task.awaiting.using(using).values_list("awaited", flat=True)[:FEW]
        return gettext("This task waits for %(tasks)s to finish.") % {"tasks": _numbers(awaited)}
    return _at_its_key(task, using)


def _at_its_key(task: Task, using: str) -> str:
    """Return for what a task waits at its key. The keys of ``rate`` and ``group`` are lock keys with a prefix."""
    key, prefix = str(shown(task, "lock_key")), ""
    ids = [] if key.startswith(RATED) else holders(using, str(task.lock_key), limit=FEW)
    if key.startswith(RATED):
        prefix, text = RATED, _("This task waits for a token of its rate. The key of the rate is %(key)s.")
    elif key.startswith(GROUPED):
        prefix = f"{GROUPED}{task.task_path} "
        text = _("This task waits for a call of its group %(key)s. Before it, or in the same call: %(tasks)s.")
    elif "rate" in task.meta and not ids:
        text = _("This task waits for a token of its rate. The key of the rate is its lock key %(key)s.")
    else:
        text = _("This task waits for its lock key %(key)s, which is held by %(tasks)s.")
    tasks = _numbers(ids) or gettext("no task at the moment")
    return str(text) % {"key": key.removeprefix(prefix), "tasks": tasks}


def _numbers(ids: Iterable[int]) -> str:
    return ", ".join(f"#{each}" for each in ids)


def _why_no_worker_runs(task: Task, using: str) -> str:
    """Return why no worker can run a ready task; an empty string if one can."""
    found = why_unfinished(using, task.pk)
    if found is None or found.obstacle is None:
        return ""
    texts = {
        Obstacle.NO_WORKER: _("No worker knows this task: no worker is running."),
        Obstacle.PAUSED: _("No worker runs this task, because the queue %(queue)s is paused. Resume the queue."),
        Obstacle.UNKNOWN: _(
            "No worker knows this task. Do the workers import its module, and do they run the new version?"
        ),
        Obstacle.UNSERVED: _(
            "No worker that knows this task serves the queue %(queue)s. Start a worker that serves this queue."
        ),
    }
    return str(texts[found.obstacle]) % {"queue": found.queue}
