"""Which workers are alive: their rows, their pulse, and whether they sleep.

A worker shows life twice: by a heartbeat in its row, and by a session that holds an advisory lock of its own. Rescue
wants both signs gone, so that a restarted server or a cut connection condemns nobody; after the hard limit the
heartbeat alone decides, because a frozen process keeps its session, and behind a pooler no worker holds a lock.
A worker without a row is dead: it has ended in order, or its guard has seen it die.

While the server is out of reach all workers are silent, and afterwards one is the first to come back. So silence tells
of death only while somebody else, a witness, has been heard without interruption for long enough that the others would
have come back, too.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import connections, models
from django.db.models import Exists, OuterRef
from django.db.models.functions import Now

from django_pglock.conf import get_settings

#: Missing beats after which a worker without a session is dead. The little more than two is for one that is on its way.
MISSING = 2.2
#: A beat is late after so many intervals: at that moment the server may be out of reach.
LATE = 1.5
#: Intervals without a late beat that make a witness: more than ``LATE``, so that one beat alone proves nothing; and
#: less than two rounds of upkeep, so that a new worker rescues in its third round.
SETTLED = 1.75

# Registers at the first beat, and again when the row was removed while the worker was out of reach. The functions are
# many and seldom news: they are sent when they are. Beats are continuous until one comes late, or in a new session. The
# answer says how many functions the row has, and whether those who enqueue take the worker to sleep.
BEAT = """
INSERT INTO {worker} AS worker (id, name, hostname, pid, queues, threads, lock_key, is_stopping, task_paths)
VALUES (%s, %s, %s, %s, %s::jsonb, %s, %s, %s, COALESCE(%s::jsonb, '[]'))
ON CONFLICT (id) DO UPDATE
SET heartbeat_at = clock_timestamp(), is_stopping = EXCLUDED.is_stopping, lock_key = EXCLUDED.lock_key,
    beating_since = CASE WHEN %s OR worker.heartbeat_at < clock_timestamp() - make_interval(secs => %s)
                         THEN clock_timestamp() ELSE worker.beating_since END,
    task_paths = COALESCE(%s::jsonb, worker.task_paths)
RETURNING jsonb_array_length(worker.task_paths), worker.is_sleeping
"""


class WorkerQuerySet(models.QuerySet[Any]):
    """The verbs of worker rows."""

    def alive(self) -> WorkerQuerySet:
        """Workers with a sign of life within the hard limit."""
        return self.filter(heartbeat_at__gt=_ago(get_settings().HEARTBEAT_LIMIT))

    def silent(self) -> WorkerQuerySet:
        """Workers without a sign of life for longer than the hard limit."""
        return self.filter(heartbeat_at__lte=_ago(get_settings().HEARTBEAT_LIMIT))

    def witnesses(self) -> WorkerQuerySet:
        """Workers that have been heard without interruption for so long that everybody who lives has been heard."""
        interval = get_settings().HEARTBEAT_INTERVAL
        return self.filter(heartbeat_at__gt=_ago(LATE * interval), beating_since__lte=_ago(SETTLED * interval))

    def is_eldest(self, worker: UUID) -> bool:
        """Say whether this worker runs for longest of those alive: for what one of them should say."""
        return bool(self.alive().order_by("started_at", "pk").values_list("pk", flat=True).first() == worker)

    def depart(self, worker: UUID) -> None:
        """Remove the row of a worker that stopped in order."""
        self.filter(pk=worker).delete()

    def forget(self) -> int:
        """Remove rows of workers that are dead and own nothing any more. Returns how many."""
        task = self.model._meta.apps.get_model("django_pglock", "Task")
        owned = task.objects.filter(worker=OuterRef("pk"), status="RUNNING")
        return self.silent().filter(~Exists(owned), Exists(self.witnesses())).delete()[0]

    def note_sleep(self, worker: UUID, *, is_sleeping: bool) -> None:
        """Say whether the worker wants to be woken by NOTIFY."""
        self.filter(pk=worker).update(is_sleeping=is_sleeping)

    def beat(
        self,
        worker: UUID,
        *,
        name: str,
        hostname: str,
        pid: int,
        queues: list[str],
        threads: int,
        is_stopping: bool,
        lock_key: int | None = None,
        is_interrupted: bool = False,
        task_paths: list[str] | None = None,
    ) -> tuple[int, bool]:
        """Say that a worker lives; the first beat registers it.

        ``lock_key`` is the number of the lock that its session holds; None: it holds none. ``is_interrupted``: the
        session before was lost. ``task_paths`` are the functions that it knows, where that is news. Returns how many
        its row has, and whether it says that the worker sleeps.
        """
        connection = connections[self.db]
        paths = None if task_paths is None else json.dumps(task_paths)
        me = (worker, name, hostname, pid, json.dumps(queues), threads, lock_key, is_stopping)
        late = LATE * get_settings().HEARTBEAT_INTERVAL
        with connection.cursor() as cursor:
            cursor.execute(
                BEAT.format(worker=connection.ops.quote_name(self.model._meta.db_table)),
                (*me, paths, is_interrupted, late, paths),
            )
            known, is_sleeping = cursor.fetchone()
        return known, is_sleeping


def _ago(seconds: float) -> Any:
    return Now() - timedelta(seconds=seconds)


class WorkerManager(models.Manager.from_queryset(WorkerQuerySet)):  # type: ignore[misc]
    """The manager of ``Worker``."""
