"""The admin in the language of the reader."""

from __future__ import annotations

import re

import pytest
from django.contrib.admin.templatetags.admin_list import result_headers
from django.db.models.functions import Now
from django.utils.translation import override

from tests.db.admin.visits import LIST, make, person

pytestmark = pytest.mark.django_db

STATUSES = {
    "SCHEDULED": "Geplant",
    "BLOCKED": "Blockiert",
    "READY": "Bereit",
    "RUNNING": "Läuft (Abbruch angefordert)",
    "SUCCESSFUL": "Erfolgreich",
    "FAILED": "Fehlgeschlagen",
    "CANCELLED": "Abgebrochen",
}
# After the column of checkboxes.
HEADS = [
    *("Aufgabe", "Status", "Warteschlange", "letzter Fehler", "Priorität", "Versuche", "Warte- oder Laufzeit"),
    "eingereiht am",
]
# Without the empty choice, whose text is Django's and differs between versions.
ACTIONS = [
    "Hängende Aufgaben zurücksetzen",
    "Fehlgeschlagene oder abgebrochene Aufgaben wiederholen",
    "Fehlgeschlagene Aufgaben verwerfen",
    "Geplante Aufgaben jetzt ausführen",
    "Aufgaben abbrechen",
]


def test_the_list_of_tasks_is_german_for_a_german_reader(client):
    """A text that is translated at import, or inside of an f-string, would stay English."""
    person(client, "view_task", "retry_task", "reset_task", "cancel_task")
    for status in STATUSES:
        make(status, cancel_requested_at=Now() if status == "RUNNING" else None)

    with override("de"):
        page = client.get(LIST)
        heads = [str(head["text"]) for head in result_headers(page.context["cl"])]
        actions = [str(text) for name, text in page.context["action_form"].fields["action"].choices if name]

    statuses = re.findall(r"pglock-status[^>]*>([^<]*)</span>([^<]*)", page.content.decode())
    assert ["".join(parts) for parts in statuses] == list(STATUSES.values())[::-1]
    assert heads[1:] == HEADS
    assert actions == ACTIONS
