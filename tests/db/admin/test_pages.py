"""How the admin prints a count that stopped."""

from __future__ import annotations

import re
from itertools import cycle, product

import pytest
from django.contrib import admin
from django.contrib.admin.exceptions import DisallowedModelAdminLookup
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils.translation import override

from django_pglock import task
from django_pglock.admin import pages
from django_pglock.admin.failures import FailureGroup
from django_pglock.admin.overview import Overview
from django_pglock.admin.pages import ReadOnlyAdmin
from django_pglock.admin.tasks import TaskAdmin
from django_pglock.models import AdvisoryLock, Event, Lease, Queue, Schedule, Task, Worker
from tests.db.admin.visits import LIST, make, person, url

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(("grouped", "text"), [(False, "10000+"), (True, "&gt;10,000")])
def test_a_capped_count_is_shown_with_a_plus_sign(settings, grouped, text):
    from django.template import Context, Template

    settings.USE_THOUSAND_SEPARATOR = grouped
    count = pages.AtLeast(10_000)
    assert count == 10_000
    assert Template("{{ count }}").render(Context({"count": count})) == text


@pytest.mark.parametrize(("count", "text"), [(99, "99"), (100, "100"), (101, "100+")])
def test_a_count_above_the_limit_is_capped(count, text):
    assert str(pages.capped(count, 100)) == text


#: All lookups that each list serves, with a value for each.
SERVED = {
    Task: {
        "status__exact": "FAILED",
        "queue": "mail",
        "task_path": "a.b",
        "attention": "stuck",
        "suspended": "SCHEDULED",
        "event": "packed:7",
        "id__lt": "5",
        "fingerprint__exact": "7",
        "exception": "a.B",
        "since": "2026-01-01",
        "before": "2026-01-01T12:00",
        "worker": "w",
        "key": "order:1",
        "argument": "a=1",
        "metadata": "a=1",
    },
    Worker: {},
    AdvisoryLock: {"is_granted__exact": "1", "mode": "ExclusiveLock"},
    Lease: {"held": "1"},
    Queue: {"paused": "1"},
    Schedule: {"is_enabled__exact": "1"},
    Event: {},
}


#: The names of filters that are not names of fields.
OF_FILTERS = {
    "attention",
    "suspended",
    "event",
    "held",
    "paused",
    "exception",
    "since",
    "before",
    "key",
    "argument",
    "metadata",
}


LOOKUPS = (
    *("", "exact", "iexact", "startswith", "icontains", "regex", "isnull", "in", "gt", "lt", "gte", "lte"),
    *("email", "email__startswith", "0__regex", "year", "length"),
)


def permission_to_view(model):
    return f"view_{model._meta.model_name}"


def address(model, page="changelist", *args):
    return url(model._meta.model_name, page, *args)


def names_of(model):
    """Every name with which a lookup may begin: columns, relations, and the fields of related models."""
    names = {"pk", "id", "nothing"}
    for field in model._meta.get_fields(include_hidden=True):
        names |= {field.name, getattr(field, "attname", field.name)}
        if field.is_relation:
            names |= {f"{field.name}__{each.name}" for each in field.related_model._meta.get_fields()}
    return sorted(names)


def asked(client, where, query=None, method="get"):
    """Return the response, and the statements about our tables."""
    with CaptureQueriesContext(connection) as queries:
        response = getattr(client, method)(where, query)
    return response, [each["sql"] for each in queries if '"django_pglock_' in each["sql"]]


def test_every_model_of_ours_is_in_this_test():
    ours = {model: each for model, each in admin.site._registry.items() if model._meta.app_label == "django_pglock"}
    # The overview and the page of failures are no lists of rows, and ignore lookups.
    assert ours.keys() == SERVED.keys() | {FailureGroup, Overview}
    assert all(isinstance(each, ReadOnlyAdmin) for each in ours.values())


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.__name__)
def test_a_list_serves_its_own_lookups_and_refuses_all_others_without_a_query(client, rf, model):
    user = person(client, permission_to_view(model))
    served = SERVED[model]
    for name, value in served.items():
        response, queries = asked(client, address(model), {name: value})
        assert (response.status_code, bool(queries)) == (200, True), name
    lookups = {"__".join(filter(None, (name, lookup))) for name in names_of(model) for lookup in LOOKUPS}
    assert served.keys() - OF_FILTERS <= lookups, "so those that are served are among the asked"
    assert len(lookups) > 100
    # Leads to the filter of this name.
    lookups.discard("status")
    user.get_all_permissions()
    with CaptureQueriesContext(connection) as queries:
        for lookup in sorted(lookups - served.keys()):
            request = rf.get("/", {lookup: "u"})
            request.user = user
            with pytest.raises(DisallowedModelAdminLookup):
                admin.site._registry[model].changelist_view(request)
    assert queries.captured_queries == []


def test_an_action_on_all_matching_tasks_refuses_forbidden_lookups(client):
    person(client, "view_task", "retry_task")
    row = make("FAILED", kwargs={"email": "user"})
    data = {"action": "retry", "_selected_action": [row.pk], "select_across": "1"}
    response, queries = asked(client, f"{address(Task)}?kwargs__email__startswith=u", data, "post")
    assert (response.status_code, queries) == (400, [])
    assert Task.objects.get().status == "FAILED"


@pytest.mark.parametrize("extra", ["e=1", "o=1", "q=1", "_popup=1", "_facets=True", "all=", "_to_field=id", "p=2"])
def test_other_query_parameters_do_not_allow_a_forbidden_lookup(client, extra):
    response, queries = asked(client, f"{address(Task)}?kwargs__email__startswith=u&{extra}")
    assert (response.status_code, queries) == (400, [])


@pytest.mark.parametrize("values", [("READY", "FAILED"), ("FAILED", "FAILED")])
def test_a_lookup_with_several_values_is_refused_without_a_query(client, values):
    """No filter links to two statuses, and no index has the rows of two statuses in the order of the list."""
    response, queries = asked(client, address(Task), {"status__exact": values})
    assert (response.status_code in (302, 400), queries) == (True, [])


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.__name__)
def test_admin_pages_refuse_to_field_unless_it_names_the_primary_key(client, model):
    person(client, permission_to_view(model))
    key = model._meta.pk.name
    urls = address(model), address(model, "change", "1"), address(model, "delete", "1")
    pages = list(product(urls, ("get", "post")))
    others = [field.name for field in model._meta.fields if field.name != key]
    for (where, method), name in zip(pages, cycle(others)):
        response, queries = asked(client, f"{where}?_to_field={name}", method=method)
        assert (response.status_code, queries) == (400, []), (where, method, name)
    assert client.get(address(model), {"_to_field": key, "_popup": "1"}).status_code == 200


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.__name__)
def test_a_list_is_sorted_only_by_the_columns_that_it_offers(client, rf, model):
    """The order of the rows would reveal the hidden values, and no index has it."""
    user = person(client, permission_to_view(model))
    orders = set()
    for order in ("", "kwargs", "-kwargs", "2.3.4.5.6.7.8.9", "-2.-3.-4.-5.-6", "kwargs__email", "99", "."):
        request = rf.get("/", {"o": order} if order else {})
        request.user = user
        # The view reads the rows. To render the page takes longer.
        rows = admin.site._registry[model].changelist_view(request).context_data["cl"].queryset
        orders.add(tuple(dict.fromkeys(rows.query.order_by)))
    assert len(orders) == 1, "as without the parameter"


@pytest.mark.usefixtures("own_registry")
def test_the_search_reads_no_arguments(client):
    person(client, *{permission_to_view(model) for model in SERVED})
    task(redact=True)(make)
    make(kwargs={"email": "user"}, lock_key="user", unique_key="user", unique_scope="WAITING")
    for term in ("user", "kwargs__email__startswith:user", '"user"'):
        response, queries = asked(client, address(Task), {"q": term})
        assert len(response.context["cl"].result_list) == 0
        for sql in queries:
            condition = sql.partition("WHERE")[2]
            assert not {"args", "kwargs", "result", "meta", "unique_key", "lock_key"} & {*condition.split('"')}


def complete(client, term, source="attempt", field="task"):
    query = {"app_label": "django_pglock", "model_name": source, "field_name": field, "term": term}
    return asked(client, reverse("admin:autocomplete"), query)


def test_autocomplete_finds_tasks_by_the_search_of_the_list(client):
    row = make(kwargs={"email": "user"}, lock_key="user")
    response, queries = complete(client, str(row.pk))
    assert response.json()["results"] == [{"id": str(row.pk), "text": str(row)}]
    assert complete(client, "user")[0].json()["results"] == []
    assert complete(client, "u", field="traceback")[0].status_code == 403
    person(client, "view_worker")
    response, queries = complete(client, str(row.pk))
    assert (response.status_code, queries) == (403, [])


class LooseAdmin(TaskAdmin):
    """A subclass as a project may write it."""

    list_filter = [*TaskAdmin.list_filter, "priority", ("finished_at", admin.DateFieldListFilter), "failures"]
    linked_lookups = (*TaskAdmin.linked_lookups, "rescues__gt")


@pytest.mark.parametrize(
    ("lookup", "is_allowed"),
    [
        ("status__exact", True), ("status__isnull", False), ("status", False), ("id__lt", True), ("rescues__gt", True),
        ("rescues__lt", False), ("priority", True), ("priority__regex", False),
        ("finished_at__gte", True), ("finished_at__lt", True), ("finished_at__isnull", True),
        ("finished_at__year", False), ("failures__id__exact", True), ("failures__traceback__contains", False),
        ("enqueued_at__gte", False), ("kwargs", False),
        ("kwargs__email", False), ("queue", True), ("queue__startswith", False),
    ],
)  # fmt: skip
def test_a_subclass_of_an_admin_allows_the_lookups_of_its_own_filters(rf, lookup, is_allowed):
    own = LooseAdmin(Task, admin.site)
    assert own.lookup_allowed(lookup, "1", rf.get("/")) is is_allowed


# The admin in the language of the reader.


STATUSES = {
    "SCHEDULED": "Geplant",
    "BLOCKED": "Blockiert",
    "READY": "Bereit",
    "RUNNING": "Läuft (Abbruch angefordert)",
    "SUCCESSFUL": "Erfolgreich",
    "FAILED": "Fehlgeschlagen",
    "CANCELLED": "Abgebrochen",
}


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
        actions = [str(text) for name, text in page.context["action_form"].fields["action"].choices if name]

    statuses = re.findall(r"pglock-status[^>]*>([^<]*)</span>([^<]*)", page.content.decode())
    assert ["".join(parts) for parts in statuses] == list(STATUSES.values())[::-1]
    assert actions == ACTIONS
