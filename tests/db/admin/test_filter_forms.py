"""Filters that take typed text."""

from __future__ import annotations

import pytest

from tests.db.admin.visits import LIST, person

pytestmark = pytest.mark.django_db


def test_functions_and_queues_are_suggestions_and_not_links(client):
    """Hundreds of links would fill the page."""
    person(client, "view_task")
    page = client.get(LIST, {"status__exact": "FAILED", "queue": "no-such", "q": "nothing"}).content.decode()
    assert '<option value="tests.sample.tasks.nothing">' in page
    assert "?task_path=" not in page
    assert '<input type="hidden" name="status__exact" value="FAILED">' in page
    assert '<input type="hidden" name="queue" value="no-such">' in page
    assert '<input type="hidden" name="q" value="nothing">' in page
    assert page.count('name="queue"') > page.count('type="hidden" name="queue"'), "and the input itself"
