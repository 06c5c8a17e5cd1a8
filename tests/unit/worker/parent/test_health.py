"""The health of a parent whose parts are made up."""

from __future__ import annotations

import time
from types import SimpleNamespace

from django_pglock.worker.parent.health import Health
from django_pglock.worker.parent.heartbeat import MigrationsPending


def crew_of(**heartbeat):
    return SimpleNamespace(all=[], checked_at=time.monotonic(), heartbeat=SimpleNamespace(**heartbeat))


def child_of(**report):
    return SimpleNamespace(report=report)


def test_of_several_problems_the_one_that_explains_the_others_is_named():
    """A worker that stops has no connection any more, and one without a connection writes no heartbeat."""
    crew = crew_of(last_error=MigrationsPending("0002_later"), is_connected=False, beat_at=None)
    health = Health([crew])
    health.is_stopping = True
    crew.checked_at -= 1e6
    cures = [
        ("The worker is stopping.", health, "is_stopping", False),
        ("Migrations of django_pglock are pending.", crew.heartbeat, "last_error", None),
        ("The worker has no connection to the database.", crew.heartbeat, "is_connected", True),
        ("The first heartbeat is not written yet.", crew.heartbeat, "beat_at", time.monotonic() - 1e6),
        ("The last heartbeat was written 1000000 s ago.", crew.heartbeat, "beat_at", time.monotonic()),
        ("No process of the worker runs at the moment.", crew, "all", [child_of()]),
        ("A process of the worker starts.", crew, "all", [child_of(unready="It polls."), child_of()]),
        ("It polls.", crew, "all", [child_of(unready="It polls."), child_of(unready=None)]),
        ("The worker has not responded for 1000000 s.", crew, "checked_at", time.monotonic()),
    ]
    for problem, part, name, value in cures:
        assert health.unready() == problem
        setattr(part, name, value)
    assert health.unready() is None


def test_a_worker_of_two_databases_is_ready_if_it_works_in_both():
    crews = [crew_of(last_error=None, is_connected=True, beat_at=time.monotonic() - number) for number in (0, 1)]
    for crew in crews:
        crew.all = [child_of(unready=None)]
    health = Health(crews)
    assert health.unready() is None
    assert health.beat_age() >= 1
    crews[1].heartbeat.is_connected = False
    assert health.unready() == "The worker has no connection to the database."
    crews[1].heartbeat.beat_at = None
    assert health.beat_age() is None


def test_a_parent_without_a_database_lives():
    """Otherwise all workers would be restarted while the server is."""
    crew = crew_of(last_error=None, is_connected=False, beat_at=None)
    health = Health([crew])
    assert health.hung() is None
    crew.checked_at -= 1e6
    assert health.hung() == "The worker has not responded for 1000000 s."
