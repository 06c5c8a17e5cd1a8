"""A service goes on whatever happens in its turns."""

from __future__ import annotations

import pytest
from django.db import ProgrammingError

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


def test_a_service_goes_on_whatever_its_turn_raises(worker, eventually, monkeypatch):
    turns = []

    def leave():
        turns.append(1)
        raise SystemExit("a mistake of ours")

    process = worker()
    monkeypatch.setattr(process.upkeep, "turn", leave)
    process.upkeep.wake()
    eventually(lambda: len(turns) > 1)
    assert process.health.missing() is None


def test_a_refusal_of_the_server_is_not_called_a_lost_connection(worker, eventually, monkeypatch, caplog):
    def refuse():
        raise ProgrammingError("permission denied for table django_pglock_task")

    process = worker()
    monkeypatch.setattr(process.upkeep, "turn", refuse)
    process.upkeep.wake()
    eventually(lambda: "The upkeep cannot do its work and tries again: permission denied for table" in caplog.text)
