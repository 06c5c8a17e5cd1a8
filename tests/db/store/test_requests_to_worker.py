"""Requests of users to a worker about its running tasks."""

from __future__ import annotations

import os
from uuid import uuid4

import pytest
from django.db import ProgrammingError, connection

from django_pglock.models import Task
from django_pglock.store import requests_to_worker
from django_pglock.store.requests_to_worker import requests_to
from django_pglock.store.running_stack import answer_stack, request_stack
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_worker_gets_the_requests_about_the_tasks_that_it_runs(mine, claim):
    tasks.nothing.enqueue()
    [other] = claim()
    assert requests_to("default", mine.worker) == ([], [])
    Task.objects.filter(pk=mine.id).cancel()
    assert requests_to("default", mine.worker) == ([(mine.id, mine.attempt)], [])
    request_stack("default", other.id)
    assert requests_to("default", mine.worker) == ([(mine.id, mine.attempt)], [])
    assert requests_to("default", other.worker) == ([], [(other.id, other.attempt)])
    answer_stack("default", other.id, other.attempt, other.worker, "here")
    assert requests_to("default", other.worker) == ([], [])
    assert requests_to("default", uuid4()) == ([], [])


def test_requested_cancels_are_read_by_a_role_without_rights_on_the_stacks(mine, caplog, monkeypatch):
    """As after an upgrade: the rights of the role were granted for an earlier version."""
    monkeypatch.setattr(requests_to_worker, "_forbidden", set())
    Task.objects.cancel()
    request_stack("default", mine.id)
    role = f"pglock_old_{os.getpid()}"  # roles belong to the server, not to the tests' database
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}; GRANT SELECT ON django_pglock_task TO {role}; SET ROLE {role}")
        try:
            for _ in range(2):
                assert requests_to("default", mine.worker) == ([(mine.id, mine.attempt)], [])
        finally:
            cursor.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")
    assert caplog.text.count("permission denied") == 1


def test_another_error_of_the_statement_is_raised(monkeypatch):
    monkeypatch.setattr(requests_to_worker, "_forbidden", set())
    monkeypatch.setattr(requests_to_worker, "REQUESTS", "SELECT missing FROM {task} WHERE worker IN (%s, %s, %s)")
    with pytest.raises(ProgrammingError, match="missing"):
        requests_to("default", uuid4())
