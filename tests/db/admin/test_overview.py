"""The overview: its permissions and sections, and the links to it."""

from __future__ import annotations

import re

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.management import call_command
from django.urls import reverse

from django_pglock.admin.failures import FailureGroup
from django_pglock.admin.overview import VIEWED, Overview
from django_pglock.models import Queue
from tests.db.admin.test_security import refuse_activity
from tests.db.admin.visits import make, person, start_worker

pytestmark = pytest.mark.django_db

PAGE = reverse("admin:django_pglock_overview_changelist")
FRAGMENT = reverse("admin:django_pglock_overview_fragment")


def sections(response):
    return re.findall(r'<h2 id="pglock-(\w+)"', response.content.decode())


@pytest.mark.parametrize("address", [PAGE, FRAGMENT])
def test_the_overview_asks_for_permission(client, address):
    assert client.get(address).status_code == 302
    person(client)
    assert client.get(address).status_code == 403
    person(client, "view_task")
    assert client.get(address).status_code == 200
    assert client.post(address).status_code == 405


def test_the_options_in_the_context_have_an_app(admin_client):
    """Themes such as django-unfold show the name of ``opts.app_config``; a model without registry has none."""
    opts = admin_client.get(PAGE).context.get("opts")
    assert opts is None or opts.app_config is not None


@pytest.mark.parametrize("name", ["index", "app_list"])
def test_the_indexes_lead_to_the_overview(client, name):
    address = reverse(f"admin:{name}", args=["django_pglock"] if name == "app_list" else [])
    person(client, "view_worker")
    assert f'href="{PAGE}"' in client.get(address).content.decode()
    User.objects.filter(is_staff=True).delete()
    person(client, "view_user")
    page = client.get(reverse("admin:index")).content.decode()
    assert "/auth/user/" in page
    assert PAGE not in page


def test_each_view_permission_allows_the_overview(client):
    for model in VIEWED:
        person(client, f"view_{model._meta.model_name}")
        assert client.get(PAGE).status_code == 200, model
    ours = {model for model in admin.site._registry if model._meta.app_label == "django_pglock"}
    # Failures are viewed with the permission to view tasks.
    assert ours == {Overview, FailureGroup, *VIEWED}, "a new page of this package is in the list, too"


@pytest.mark.parametrize(
    ("permissions", "shown"),
    [
        (["view_schedule"], ["attention"]),
        (["view_worker"], ["attention", "workers"]),
        (["view_task"], ["attention", "queues", "history"]),
        (["view_task", "view_worker"], ["attention", "queues", "workers", "history"]),
    ],
)
def test_the_overview_shows_only_sections_that_the_user_may_view(client, permissions, shown):
    Queue.objects.pause("mail")
    person(client, *permissions)
    page = client.get(PAGE)
    assert sections(page) == shown
    assert "has been paused" not in page.content.decode()


def test_a_quiet_system_needs_no_attention(client):
    start_worker()
    person(client, "view_task", "view_worker")
    page = client.get(PAGE).content.decode()
    assert "Nothing needs attention." in page


def test_the_fragment_is_the_part_of_the_page_that_changes(client):
    person(client, "view_task", "view_worker")
    page, fragment = (client.get(url, {"span": "day"}).content.decode() for url in (PAGE, FRAGMENT))
    assert fragment.strip() in page
    assert "<html" not in fragment
    assert f'data-url="{FRAGMENT}?span=day"' in page
    assert 'href="?span=day">Refresh</a>' in page, "the page works without JavaScript"


def test_the_overview_escapes_names(client):
    evil = '<script>alert(1)</script>"onmouseover="z'
    Queue.objects.pause(evil, by=evil, reason=evil)
    make(queue=evil, task_path=evil)
    start_worker(evil)
    person(client, "view_task", "view_worker", "view_queue")
    for url in (PAGE, FRAGMENT):
        page = refuse_activity(client.get(url))
        assert "&lt;script&gt;" in page


def test_makemigrations_creates_no_migration_for_the_overview():
    """The model of the overview has no table, so a project gets no migration for it."""
    call_command("makemigrations", "django_pglock", check=True, dry_run=True, verbosity=0)
    assert Overview not in apps.get_models()
