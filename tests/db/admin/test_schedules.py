"""The admin pages of schedules, and the history of one schedule."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_pglock import task
from django_pglock.models import Schedule, Task
from django_pglock.tasks import registry
from django_pglock.tasks.options import Unique
from tests.db.admin.visits import act, add_attempt, logged, person, said, url
from tests.db.store.schedules import enqueue_due, of_code, register
from tests.sample import scheduled

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry")]

LIST = url("schedule")


@pytest.fixture
def nightly():
    task(every=3600, unique=Unique(on_conflict="raise"))(scheduled.nightly)
    register()
    return Schedule.objects.get()


def test_the_list_and_the_page_show_a_schedule(client, nightly):
    person(client, "view_schedule")
    [made] = Schedule.objects.all().run_now()
    Schedule.objects.update(last_task=made, last_at=Now())
    for address in (LIST, url("schedule", "change", nightly.pk)):
        page = client.get(address, follow=True).content.decode()
        next_at = f"{nightly.next_at:%Y-%m-%d %H:%M:%S} UTC"
        for text in (nightly.pk, "every 3600 s", f"#{made}</a>", "enabled</span>", next_at):
            assert text in page
        assert " style=" not in page
        assert "onclick" not in page
        assert "_save" not in page
    Schedule.objects.update(is_enabled=False)
    assert "disabled</span>" in client.get(LIST).content.decode()


def test_a_schedule_of_removed_code_becomes_overdue(client):
    person(client, "view_schedule")
    row = of_code("gone.tasks.nightly")
    assert "overdue" not in client.get(LIST).content.decode()
    Schedule.objects.update(next_at="2026-01-01T00:00:00Z")
    assert "overdue" in client.get(LIST).content.decode()
    delete = url("schedule", "delete", row.pk)
    assert client.post(delete, {"post": "yes"}).status_code == 403
    person(client, "view_schedule", "delete_schedule")
    client.post(delete, {"post": "yes"})
    assert not Schedule.objects.exists()


@pytest.mark.parametrize(
    ("action", "enabled", "text"),
    [
        ("disable", True, "1 schedule was disabled."),
        ("enable", False, "1 schedule was enabled."),
        ("run_now", True, "1 task was enqueued."),
    ],
)
def test_an_action_changes_the_schedule_and_leaves_an_entry(client, nightly, action, enabled, text):
    Schedule.objects.update(is_enabled=enabled)
    user = person(client, "view_schedule", "change_schedule")
    assert said(act(client, action, nightly, url=LIST)) == [text]
    assert Schedule.objects.get().is_enabled is (action != "disable")
    assert Task.objects.count() == (action == "run_now")
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id, entry.change_message) == (user, nightly.pk, f"{action}: 1")
    assert said(act(client, action, nightly, url=LIST))[0].startswith("1 schedule ")
    assert Task.objects.count() == (action == "run_now"), "it is unique"


@pytest.mark.parametrize("verb", ["run_now", "disable"])
def test_a_button_on_the_page_of_a_schedule_applies_its_verb(client, nightly, verb):
    user, page = person(client, "view_schedule", "change_schedule"), url("schedule", "change", nightly.pk)
    button = url("schedule", "verb", nightly.pk, verb)
    assert button in client.get(page).content.decode()
    assert client.post(button, follow=True).redirect_chain == [(page, 302)]
    assert Task.objects.count() == (verb == "run_now")
    assert Schedule.objects.get().is_enabled is (verb == "run_now")
    assert (LogEntry.objects.get().user, logged()) == (user, [f"{verb}: 1"])


def test_actions_change_all_schedules_of_all_pages(client):
    for number in range(3):
        of_code(f"m.f{number}")
    person(client, "view_schedule", "change_schedule")
    data = {"action": "disable", "_selected_action": ["m.f0"], "select_across": "1"}
    assert said(client.post(LIST, data, follow=True)) == ["3 schedules were disabled."]
    assert not Schedule.objects.filter(is_enabled=True).exists()


def tick(at):
    """Make the tick of a given time due and enqueue it. Returns its task."""
    Schedule.objects.update(next_at=at)
    [id_] = enqueue_due().tasks
    return Task.objects.get(pk=id_)


@pytest.mark.django_db(transaction=True)
def test_the_page_of_a_schedule_shows_its_last_runs(client, own_registry):
    task(every=3600)(scheduled.nightly)
    register()
    now = timezone.now()
    runs = [tick(now - timedelta(hours=hours)) for hours in (9, 8, 5)]
    succeeded = {"status": "SUCCESSFUL", "started_at": now, "finished_at": now + timedelta(seconds=1.5)}
    Task.objects.filter(pk=runs[0].pk).update(**succeeded, last_attempted_at=now)
    failed = {"status": "FAILED", "attempts": 1, "started_at": now, "finished_at": now}
    Task.objects.filter(pk=runs[1].pk).update(**failed, last_attempted_at=now)
    add_attempt(runs[1], traceback="Traceback\nValueError: no rates")
    address = url("schedule", "change", runs[0].task_path)

    person(client, "view_schedule")
    assert "Last runs" not in client.get(address).content.decode(), "they are tasks"
    person(client, "view_schedule", "view_task")
    with CaptureQueriesContext(connection) as queries:
        page = client.get(address)
    assert len([each for each in queries if "django_pglock" in each["sql"]]) <= 6
    newest, failed, first = page.context["pglock_runs"]
    assert [run["task"].pk for run in (newest, failed, first)] == [each.pk for each in reversed(runs)]
    assert (first["took"], first["error"], failed["error"]) == ("1.500 s", "", "ValueError: no rates")
    assert first["tick"] == runs[0].meta["schedule"]
    text = page.content.decode()
    for part in (f"#{runs[1].pk}</a>", "ValueError: no rates", "Failed</span>"):
        assert part in text
    assert "Ready</span>" in client.get(LIST).content.decode(), "the status of the last task"


# Schedules of people


PATH = "tests.sample.scheduled.with_argument"
ADD = url("schedule", "add")


@pytest.fixture
def function(own_registry):
    return task(scheduled.with_argument)


def typed(**changes):
    texts = {"name": "mine", "task_path": PATH, "args": "[1]", "kwargs": "", "timezone": "", "note": "for Anna"}
    return {**texts, "expression": "every 5 minutes", "is_enabled": "on", **changes}


def test_people_create_edit_and_delete_schedules(client, function):
    user = person(client, "view_schedule", "add_schedule", "delete_schedule")
    page = client.get(ADD).content.decode()
    assert f'<option value="{PATH}">' in page
    assert "null" not in page, "what is not typed is an empty list"
    for text in ("Task function:", "Arguments:", ">\n[]</textarea>", ">\n{}</textarea>"):
        assert text in page
    assert " style=" not in page
    client.post(ADD, typed())
    row = Schedule.objects.get()
    assert (row.pk, row.args, row.kwargs, row.is_enabled) == ("mine", [1], {}, True)
    change = url("schedule", "change", row.pk)
    assert 'name="name"' not in client.get(change).content.decode(), "it keeps its name"
    client.post(change, typed(args="[2]", expression="30 7 * * 1-5", timezone="Europe/Berlin"))
    row.refresh_from_db()
    assert (row.args, row.expression, row.timezone, row.note) == ([2], "30 7 * * 1-5", "Europe/Berlin", "for Anna")
    client.post(url("schedule", "delete", row.pk), {"post": "yes"})
    assert not Schedule.objects.exists()
    assert list(LogEntry.objects.values_list("user", "object_id", "action_flag").order_by("pk")) == [
        (user.pk, "mine", flag) for flag in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"task_path": "os.system"}, "task_path", "Select a valid choice"),
        ({"args": "[1, 2]"}, "args", "too many positional arguments"),
        ({"args": "{}"}, "args", None),
        ({"args": '{"number": 1}'}, "args", "Give a JSON list"),
        ({"expression": "soon"}, "expression", "every 5 minutes"),
        ({"expression": "0 0 31 2 *"}, "expression", "not a cron expression"),
        ({"expression": "0 3 * * *", "timezone": "Mars"}, "expression", "not a time zone"),
        ({"name": PATH}, "name", "stands in the code"),
    ],
    ids=str,
)
def test_the_form_says_beside_a_field_what_is_wrong(client, function, changes, field, text):
    person(client, "view_schedule", "add_schedule")
    errors = client.post(ADD, typed(**changes)).context["adminform"].form.errors
    assert field in errors
    assert text is None or text in str(errors[field])
    assert not Schedule.objects.exists()


def test_an_edit_repeats_no_tick_that_comes_while_the_form_is_open(client, function):
    person(client, "view_schedule", "add_schedule")
    client.post(ADD, typed())
    enqueue_due()
    register()
    change = url("schedule", "change", "mine")
    client.get(change)
    made = tick(timezone.now())
    client.post(change, typed(note="later"))
    row = Schedule.objects.get()
    assert (row.note, row.last_task) == ("later", made.pk)
    assert row.next_at > timezone.now()


def test_schedules_of_the_code_cannot_be_edited(client, nightly):
    person(client, "view_schedule", "add_schedule", "change_schedule")
    change = url("schedule", "change", nightly.pk)
    page = client.get(change).content.decode()
    assert "in the code" in page
    assert "_save" not in page
    assert client.post(change, typed(name=nightly.pk)).status_code == 403
    assert "in the code" in client.get(LIST).content.decode()


@pytest.mark.parametrize("permissions", [("view_schedule",), ("view_schedule", "change_schedule")])
def test_who_may_not_add_schedules_may_not_edit_them(client, function, permissions):
    """With other arguments a function may do anything that it can."""
    Schedule.objects.create(name="mine", task_path=PATH, args=[1], expression="every 1 h")
    person(client, *permissions)
    change = url("schedule", "change", "mine")
    assert "_save" not in client.get(change).content.decode()
    assert client.get(ADD).status_code == client.post(ADD, typed()).status_code == 403
    assert client.post(change, typed(args="[2]")).status_code == 403
    assert Schedule.objects.get().args == [1]


def test_hidden_arguments_are_neither_shown_nor_lost(client):
    task(redact=["number"])(scheduled.with_argument)
    Schedule.objects.create(name="mine", task_path=PATH, args=["s3cret"], expression="every 1 h")
    person(client, "view_schedule", "add_schedule")
    change = url("schedule", "change", "mine")
    page = client.get(change).content.decode()
    assert "s3cret" not in page
    assert "[redacted]" in page
    client.post(change, typed(note="still secret"))
    row = Schedule.objects.get()
    assert (row.note, row.args) == ("still secret", ["s3cret"])


def test_a_schedule_whose_function_has_left_the_code_says_so(client, function):
    Schedule.objects.create(name="mine", task_path=PATH, args=[1], expression="every 1 h")
    del registry._definitions[PATH]
    Schedule.objects.update(next_at="2026-01-01T00:00:00Z")
    person(client, "view_schedule", "add_schedule")
    assert "does not know its function" in client.get(LIST).content.decode()
    change = url("schedule", "change", "mine")
    assert PATH not in str(client.get(change).context["adminform"].form["task_path"]), "no other one is chosen"
    assert "task_path" in client.post(change, typed()).context["adminform"].form.errors


def test_a_name_may_have_any_characters_and_its_task_links_to_it(client, function):
    name = 'news/for "list_5"? <é>'
    Schedule.objects.create(name=name, task_path=PATH, args=[1], expression="every 1 h")
    person(client, "view_schedule", "change_schedule", "add_schedule", "view_task")
    enqueue_due()
    register()
    made = tick(timezone.now())
    change = url("schedule", "change", quote(name))
    assert f'href="{change}"' in client.get(url("task", "change", made.pk)).content.decode()
    button = url("schedule", "verb", quote(name), "disable")
    assert button in client.get(change).content.decode()
    assert client.post(button, follow=True).redirect_chain == [(change, 302)]
    assert not Schedule.objects.get().is_enabled
    client.post(change, typed(note="edited"))
    row = Schedule.objects.get()
    assert (row.pk, row.note, row.is_enabled) == (name, "edited", True)


@pytest.mark.parametrize("verb", ["run_now", "enable"])
def test_a_verb_that_a_row_cannot_have_says_why(client, function, verb):
    """The function takes other arguments now, and another program has written the times."""
    broken = {"args": [1, 2], "expression": "every blue moon", "next_at": Now() - timedelta(days=1)}
    Schedule.objects.bulk_create([Schedule(name="mine", task_path=PATH, is_enabled=False, **broken)])
    person(client, "view_schedule", "change_schedule")
    [text] = said(client.post(url("schedule", "verb", "mine", verb), follow=True))
    assert {"run_now": "too many positional arguments", "enable": "not an interval"}[verb] in text
    assert not Task.objects.exists()
    assert not Schedule.objects.get().is_enabled
