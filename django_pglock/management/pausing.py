"""The arguments of ``locktasks pause`` and ``locktasks resume``, and their work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _

from django_pglock.management.arguments import WrongArguments
from django_pglock.management.choosing import plain_text
from django_pglock.management.terminal import name_of_user
from django_pglock.models import Queue
from django_pglock.store.numbers import queues_without_row
from django_pglock.store.operate import check_target
from django_pglock.tasks import registry
from django_pglock.tasks.compat import task_backends


def add_queue(parser: CommandParser) -> None:
    """Add the name of the queue."""
    parser.add_argument("queue", type=plain_text, metavar="QUEUE")


def add_pause(parser: CommandParser) -> None:
    """Add the arguments of ``pause``."""
    add_queue(parser)
    parser.add_argument("--reason", type=plain_text, default="", help=_("Why the queue is paused; shown in the admin."))


def pause(using: str, options: dict[str, Any], *, say: Callable[[str], Any], warn: Callable[[str], Any]) -> None:
    """Pause the queue. Warn about a name that QUEUES does not list: it may have a typing error."""
    queue = options["queue"]
    is_known = _is_known(using, queue)
    try:
        is_new = Queue.objects.db_manager(using).pause(queue, by=name_of_user(), reason=options["reason"])
    except ValueError as error:
        raise WrongArguments(str(error)) from error
    say((_("Queue %r was paused.") if is_new else _("Queue %r is paused already.")) % queue)
    try:
        check_target(using, queue)
    except ValueError as error:
        warn(str(error))
    else:
        if not is_known:
            warn(_("No task is in this queue so far, and no function is enqueued there. Is the name right?"))


def _is_known(using: str, queue: str) -> bool:
    has_row = Queue.objects.using(using).filter(name=queue).exists()
    is_named = any(queue in backend.queues for backend in task_backends.all())
    has_function = any(task.queue_name == queue for task in registry.definitions())
    return has_row or is_named or has_function or queue in queues_without_row(using)


def resume(using: str, options: dict[str, Any], *, say: Callable[[str], Any]) -> None:
    """Resume the queue. Raises ``CommandError`` if it is not paused."""
    queue = options["queue"]
    try:
        was_paused = Queue.objects.db_manager(using).resume(queue)
    except ValueError as error:
        raise WrongArguments(str(error)) from error
    if not was_paused:
        raise CommandError(_("Queue %r is not paused.") % queue)
    say(_("Queue %r was resumed.") % queue)
