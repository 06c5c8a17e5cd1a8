"""The worker as Python sees it: the options of ``runlockworker``, and a call that runs until the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from django.db import connections

from django_pglock.errors import ConfigurationError, model_of
from django_pglock.worker.options import check_options, database_to_serve
from django_pglock.worker.parent.parent import Parent
from django_pglock.worker.queues import Queues


def no_command() -> Sequence[str]:
    """Raise ``ConfigurationError``: a worker in Python knows no command line that starts its children."""
    raise ConfigurationError("Here a process cannot be forked. Run manage.py runlockworker.")


class Worker:
    """Runs tasks of some queues in child processes until it is stopped, as ``manage.py runlockworker`` does.

    ``using`` are database aliases (empty: the one that the backends in TASKS use). ``backend`` is the alias in TASKS of
    the backend to serve, if several backends share the database (None: all of them). ``queues`` and ``exclude`` are the
    queues to serve (none: all queues). ``processes`` is the number of child processes for each database, ``threads``
    the number of sync tasks that run at once in each. ``grace`` is the number of seconds that running tasks get to
    finish after a stop. With ``drain`` the worker ends when no task that it could claim is left in its queues, nothing
    is in flight, and no task of these queues runs on a worker that may be dead. Tasks that are scheduled for later do
    not count. Then ``left_behind`` has the tasks that it could not run.

    A process is replaced when it has run ``max_tasks`` tasks, or uses more than ``max_memory`` MiB. ``probe_port`` is
    the port, or ``"ADDRESS:PORT"``, at which the worker answers probes over HTTP. ``reloads``: the worker ends when
    code changes, and ``code_has_changed`` says so. ``command`` returns the command line with which children are started
    where a process cannot be forked.

    Raises ``ConfigurationError`` for an unknown alias, for a database without tasks, if ``using`` is empty and the
    backends in TASKS use several databases, for invalid queues, and for a number that is out of bounds.
    """

    def __init__(
        self,
        *,
        using: str | Sequence[str] = (),
        backend: str | None = None,
        queues: Sequence[str] = (),
        exclude: Sequence[str] = (),
        processes: int = 1,
        threads: int = 4,
        grace: float = 30.0,
        drain: bool = False,
        max_tasks: int | None = None,
        max_memory: float | None = None,
        probe_port: int | str | None = None,
        reloads: bool = False,
        command: Callable[[], Sequence[str]] = no_command,
    ) -> None:
        model_of("Task")  # raises where the app is not installed
        given: list[Any] = list(dict.fromkeys(using)) if isinstance(using, list | tuple) else [using]
        self.databases = given or [database_to_serve(backend, option="using=")]
        numbers = {"threads": threads, "grace": grace, "max_tasks": max_tasks, "max_memory": max_memory}
        for each in self.databases:
            check_options(using=each, backend=backend, processes=processes, probe_port=probe_port, **numbers)
        self.queues = Queues(queues, exclude=exclude)
        shared = {"backend": backend, "queues": list(queues), "exclude": list(exclude), "drain": drain, **numbers}
        self._make_parent = partial(
            Parent,
            [{**shared, "using": each, "queues_given": self.queues.given} for each in self.databases],
            processes=processes,
            command=command,
            probe_port=probe_port,
            reloads=reloads,
        )
        self._parent: Parent | None = None
        self._stops = 0
        #: The tasks, in words, that a worker with ``drain`` should have run but has not; empty before the end.
        self.left_behind: list[str] = []
        #: Whether the worker has ended because code has changed.
        self.code_has_changed = False

    def run(self, *, ending: Callable[[], None] = lambda: None) -> bool:
        """Run until the end. Return whether each process has ended in order.

        SIGTERM, SIGINT and SIGHUP end the worker, if this is the main thread. Calls ``ending`` when the end begins.
        Raises ``ConfigurationError`` in a ``TestCase``, which commits no task, and if the port of the probes is taken.
        """
        for each in self.databases:
            _refuse_in_test_case(each)
        self._parent = parent = self._make_parent(ending=ending)
        for _ in range(self._stops):
            parent.stop()
        code = parent.run()
        self.left_behind, self.code_has_changed = parent.left_behind, parent.code_has_changed
        return code == 0

    def stop(self) -> None:
        """Have running tasks finish, and end; at a second call, give them back. For any thread."""
        self._stops += 1
        if self._parent is not None:
            self._parent.stop()


def _refuse_in_test_case(using: str) -> None:
    blocks: list[Any] = connections[using].atomic_blocks
    if any(block._from_testcase for block in blocks):
        raise ConfigurationError(
            "A worker was started in a TestCase. It would see no task of the test, because the test commits none. "
            "Instead, call django_pglock.testing.run_tasks(), which runs the tasks in this thread, or use a "
            "TransactionTestCase (pytest: django_db(transaction=True))."
        )
