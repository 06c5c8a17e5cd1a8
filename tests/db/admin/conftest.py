"""What the tests of the admin may use."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import RequestFactory

from django_pglock.admin.overview import Facts
from tests.db.admin.visits import person


@pytest.fixture
def facts(db):
    """What a superuser may see."""
    request = RequestFactory().get("/")
    request.user = User.objects.create_superuser("root")
    return Facts(request, admin.site)


@pytest.fixture
def client(client, db):
    """A client of a person who may view tasks. ``person()`` logs in another one."""
    person(client, "view_task")
    return client
