"""``manage.py locktasks move-to-queue`` and ``delete``."""

from __future__ import annotations

import pytest
from django.core.management import CommandError

from django_pglock.models import Task
from tests.db.management.commands.test_locktasks import failed, locktasks
from tests.db.store.test_prune import make

pytestmark = pytest.mark.django_db(transaction=True)


def test_waiting_tasks_are_moved_to_another_queue():
    rows = [make("READY", days=0, queue="mail"), make("FAILED", queue="mail")]
    assert locktasks("move-to-queue", "--queue", "mail", "--to", "other", "--yes") == "1 task was moved.\n"
    assert [Task.objects.get(pk=row.pk).queue for row in rows] == ["other", "mail"]
    with pytest.raises(CommandError, match="queue"):
        locktasks("move-to-queue", "--all", "--to", "", "--yes")


def test_finished_tasks_are_deleted_whatever_their_age():
    rows = [failed(), failed(), make("READY", days=0)]
    assert locktasks("delete", "--all", "--dry-run").startswith("2 finished tasks would be deleted")
    assert locktasks("delete", rows[0].pk, rows[2].pk).splitlines()[0] == "1 task was deleted."
    assert {*Task.objects.values_list("pk", flat=True)} == {rows[1].pk, rows[2].pk}
