"""``locktasks pause`` and ``locktasks resume``."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command

from django_pglock.models import Queue, Task
from tests.db.management.commands.test_locktasks import locktasks
from tests.db.store.test_prune import make
from tests.sample import tasks

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


@pytest.mark.parametrize("verb", ["pause", "resume"])
@pytest.mark.parametrize("name", ["*", "defa*"])
def test_a_prefix_is_no_queue(verb, name):
    """A user would believe the message that 'defa*' is paused, while workers still serve the queue "default"."""
    with pytest.raises(CommandError, match=r"There is no queue '.*\*'.*Pause or resume each queue by its name"):
        locktasks(verb, name)
    assert not Queue.objects.exists()


def test_a_queue_whose_name_ends_in_a_star_is_one(settings):
    make("SCHEDULED", queue="has tasks*")
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["default", "is set*"]}}
    for name in ("has tasks*", "is set*"):
        assert "was paused" in locktasks("pause", name)
    Task.objects.all().delete()
    assert "was resumed" in locktasks("resume", "has tasks*"), "its row is there"


def test_pausing_a_queue_that_no_backend_lists_prints_a_warning(settings, capsys):
    """A mistyped name pauses the wrong queue."""
    name = settings.TASKS["default"]["BACKEND"]
    settings.TASKS = {"default": {"BACKEND": name, "QUEUES": ["default", "mail"]}}
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


def test_a_pause_of_a_queue_that_nothing_uses_asks_whether_the_name_is_right(capsys):
    tasks.echo.using(queue_name="by-call").enqueue(1)
    said = "No task is in this queue so far, and no function is enqueued there. Is the name right?"
    for queue, is_said in (("mial", True), ("mial", False), ("default", False), ("by-call", False)):
        call_command("locktasks", "pause", queue)
        assert (said in capsys.readouterr().err) is is_said
