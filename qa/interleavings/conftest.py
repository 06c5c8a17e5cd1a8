"""The sessions of a world."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_pglock.store import operate, schedules
from django_pglock.worker.child import settler
from qa.interleavings import people, workers  # noqa: F401 - they fill the table of verbs
from qa.interleavings.cases import CaseRunner
from qa.interleavings.worlds import World


@pytest.fixture
def runner(transactional_db, own_registry, settings, monkeypatch, request) -> Iterator[CaseRunner]:
    """Two or three sessions in a world."""
    # No worker of a world counts as dead because its cases take long.
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 60_000.0}
    for module, name in ((operate, "BETWEEN_REPEATS"), (settler, "BETWEEN_LOCK_CHECKS")):
        monkeypatch.setattr(module, name, 0.001)
    # The server does not end the session of a tick that is stopped for long.
    monkeypatch.setattr(schedules, "LIMIT_TICK", schedules.LIMIT_TICK.replace("'10s'", "'0'"))
    world = World(request.param.__name__, request.param)
    world.make()
    runner = CaseRunner(world)
    yield runner
    runner.close()
    world.drop()
