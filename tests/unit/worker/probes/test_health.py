"""Health of a worker whose parts are made up."""

from __future__ import annotations

import time
from types import SimpleNamespace

from django_pglock.worker.probes.health import CANNOT_BEGIN, Health


def test_of_several_problems_the_one_that_explains_the_others_is_named():
    """A worker that stops has no connection any more, and one without a connection writes no heartbeat."""
    heartbeat = SimpleNamespace(pending=["0002_later"], is_connected=False, beat_at=None)
    fetcher, executor, worker = (SimpleNamespace(**{name: True}) for name in ("is_claiming", "is_missing", "is_over"))
    fetcher.is_claiming, executor.is_unable = False, True
    health = Health([], heartbeat=heartbeat, fetcher=fetcher, executor=executor, is_stopping=lambda: worker.is_over)
    cures = [
        ("The worker is stopping.", worker, "is_over", False),
        ("Migrations of django_pglock are pending.", heartbeat, "pending", []),
        ("The worker has no connection to the database.", heartbeat, "is_connected", True),
        ("The first heartbeat is not written yet.", heartbeat, "beat_at", time.monotonic() - 1e6),
        ("The last heartbeat was written 1000000 s ago.", heartbeat, "beat_at", time.monotonic()),
        ("The fetcher claims no tasks at the moment.", fetcher, "is_claiming", True),
        ("A thread of the executor has ended.", executor, "is_missing", False),
        (CANNOT_BEGIN, executor, "is_unable", False),
    ]
    for problem, part, name, value in cures:
        assert health.unready() == problem
        setattr(part, name, value)
    assert health.unready() is None
