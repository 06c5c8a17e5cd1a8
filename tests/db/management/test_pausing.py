"""``locktasks pause`` and ``locktasks resume``."""

from __future__ import annotations

import pytest
from django.core.management import call_command

from django_pglock.models import Queue
from tests.db.management.commands.test_locktasks import locktasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_pause_and_resume():
    assert locktasks("pause", "mail", "--reason", "provider is down") == "Queue 'mail' was paused.\n"
    assert "is paused already" in locktasks("pause", "mail")
    row = Queue.objects.get()
    assert row.paused_at
    assert row.paused_by
    assert row.reason == "provider is down"
    assert locktasks("resume", "mail") == "Queue 'mail' was resumed.\n"
    row.refresh_from_db()
    assert row.paused_at is None


def test_pausing_a_queue_that_no_backend_lists_prints_a_warning(settings, capsys):
    """A mistyped name pauses the wrong queue."""
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["default", "mail"]}}
    call_command("locktasks", "pause", "mial")
    assert capsys.readouterr() == (
        "Queue 'mial' was paused.\n",
        "No backend in TASKS lists the queue 'mial' in QUEUES, so no task may be in it.\n",
    )
    call_command("locktasks", "pause", "mail")
    assert capsys.readouterr().err == ""


def test_a_container_without_users_can_pause(monkeypatch):
    def refuse():
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr("getpass.getuser", refuse)
    locktasks("pause", "mail")
    assert Queue.objects.get().paused_by == "locktasks"
