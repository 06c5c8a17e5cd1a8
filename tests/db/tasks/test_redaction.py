"""Which arguments and results are shown, and which values stay in the row."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from types import SimpleNamespace
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pglock import Cancel, DuplicateTask, Group, Rate, Unique, enqueue_many, task
from django_pglock.checks import check_settings
from django_pglock.errors import ConfigurationError, TaskArgumentsError, TaskOptionError
from django_pglock.models import Task
from django_pglock.tasks import call_keys, registry
from django_pglock.tasks.arguments import to_json
from django_pglock.tasks.redaction import REDACTED, is_redacted, redacting_paths, shown

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

SECRET = "4111-1111-1111-1111"


def pay(order_id, card, *more, address=None, **extras):
    return {"card": card, "paid": order_id}


def buy(order_id, card): ...


def with_context(context, card, note="x"):
    return card


def in_group(calls): ...


def by_order(order): ...


def cancel_or_fail(number, card):
    raise Cancel("not wanted") if number else LookupError("no such order")


def hide_cards(path, name, value):
    if name == "broken":
        raise RuntimeError(SECRET)
    return "****" if name in ("card", "return", "lock_key") else value


def row_of(function, *args, **kwargs):
    return Task.objects.get(pk=function.enqueue(*args, **kwargs).id)


def all_that_is_shown(client, row):
    """The output of all pages and commands about a task."""
    texts = [client.get(reverse("admin:django_pglock_task_change", args=[row.pk])).content.decode()]
    texts.append(client.get(reverse("admin:django_pglock_task_changelist")).content.decode())
    for command in (["show", str(row.pk)], ["show", str(row.pk), "--json"], ["list"], ["list", "--json"]):
        out = io.StringIO()
        call_command("locktasks", *command, stdout=out)
        texts.append(out.getvalue())
    return texts


def test_all_values_for_a_star_are_hidden_by_its_name():
    row = row_of(task(redact=("more",))(pay), 7, "open", SECRET, SECRET, SECRET, colour="red")
    assert shown(row, "args") == [7, "open", *[REDACTED] * 3]
    assert shown(row, "kwargs") == {"colour": "red"}


def test_functions_that_hide_a_value_are_known():
    hides, hides_all, shows = task(redact=("card",))(buy), task(redact=True)(by_order), task(pay)
    found = redacting_paths()
    assert {hides.module_path, hides_all.module_path} <= {*found}
    assert shows.module_path not in found


def test_a_redacted_argument_is_not_shown_and_stays_in_the_row(admin_client, worker, eventually, caplog):
    caplog.set_level(logging.DEBUG)
    function = task(redact=("card",), max_attempts=2)(pay)
    nested = {"card": SECRET, "pin": [{"card": SECRET}]}
    row = row_of(function.using(meta={"card": SECRET, "trace": "t1"}), 7, SECRET, nested, address=nested, card2="open")
    worker()
    eventually(lambda: Task.objects.filter(pk=row.pk, status="SUCCESSFUL").exists())
    row.refresh_from_db()
    assert (row.args[1], row.result["card"], row.kwargs["address"]["card"]) == (SECRET,) * 3
    assert function.get_result(str(row.pk)).return_value == {"card": SECRET, "paid": 7}
    assert shown(row, "args") == [7, REDACTED, {"card": REDACTED, "pin": [{"card": REDACTED}]}]
    assert shown(row, "kwargs") == {"address": {"card": REDACTED, "pin": [{"card": REDACTED}]}, "card2": "open"}
    assert shown(row, "result") == {"card": REDACTED, "paid": 7}
    assert shown(row, "meta") == {"card": REDACTED, "trace": "t1", "redact": ["card"]}
    texts = all_that_is_shown(admin_client, row)
    for text in texts:
        assert SECRET not in text
    about = json.loads(texts[3])
    assert about["args"][1] == REDACTED
    assert (about["id"], about["status"], about["queue"]) == (row.pk, "SUCCESSFUL", "default")
    assert REDACTED in texts[0]
    assert SECRET not in caplog.text + repr(function.get_result(str(row.pk)))


@pytest.mark.parametrize(
    ("meta", "hook", "expected"),
    [
        ({}, None, False),
        ({"redact": ["card"]}, None, True),
        ("unreadable", None, True),
        ({}, lambda path, name, value: value, True),
    ],
)
def test_a_row_is_redacted_if_a_value_may_have_to_be_hidden(meta, hook, expected):
    row = SimpleNamespace(task_path=task(buy).module_path, meta=meta)
    with override_settings(DJANGO_PGLOCK={"REDACT": hook} if hook else {}):
        assert is_redacted(row) is expected


@pytest.mark.parametrize("call", [(("a", SECRET), {}), ((), {"order_id": 1, "card": SECRET})])
def test_redact_true_hides_all_arguments_and_keys(admin_client, call):
    args, kwargs = call
    row = row_of(task(redact=True, lock="pay:{card}", unique="{card}", fair="{card}")(pay), *args, **kwargs)
    assert SECRET in row.lock_key
    for field in ("lock_key", "fair_key", "unique_key"):
        assert shown(row, field) == REDACTED
    assert shown(row, "group_key") is None
    assert {*shown(row, "args"), *shown(row, "kwargs").values()} == {REDACTED}
    for text in all_that_is_shown(admin_client, row):
        assert SECRET not in text


def test_redact_return_hides_the_result_and_the_context_is_not_counted():
    function = task(takes_context=True, redact=("card", "return"))(with_context)
    row = row_of(function, SECRET, "open")
    row.result = SECRET
    assert shown(row, "args") == [REDACTED, "open"]
    assert shown(row, "result") == REDACTED
    row.result = None
    assert shown(row, "result") is None


def test_hidden_arguments_stay_hidden_when_the_function_is_removed_or_changed():
    row = row_of(task(redact=("card",))(pay), 7, SECRET)
    del registry._definitions[row.task_path]
    task(pay)
    assert shown(row, "args") == [7, REDACTED], "named then"
    del registry._definitions[row.task_path]
    assert shown(row, "args") == [REDACTED, REDACTED], "nobody knows any more which argument is which"
    task(redact=True)(pay)
    assert shown(row, "args") == [REDACTED, REDACTED], "all are hidden now"
    del registry._definitions[row.task_path]
    [id_] = enqueue_many(task(pay), [(7, SECRET)])
    del registry._definitions[row.task_path]
    task(redact=("card",))(pay)
    assert shown(Task.objects.get(pk=id_), "args") == [7, REDACTED], "named since"


def test_arguments_of_a_function_that_is_gone_are_shown_where_nothing_was_hidden():
    """Users need the arguments most in this case: the task waits to be run or cancelled."""
    row = row_of(task(pay), 7, card="none")
    del registry._definitions[row.task_path]
    assert (shown(row, "args"), shown(row, "kwargs")) == ([7], {"card": "none"})


@pytest.mark.parametrize("hook", [hide_cards, f"{__name__}.hide_cards"])
def test_the_setting_replaces_the_shown_value(admin_client, hook, caplog):
    row = row_of(task(lock="pay:{card}")(pay), 7, SECRET, address={"card": SECRET}, broken=SECRET)
    row.result = {"x": 1}
    with override_settings(DJANGO_PGLOCK={"REDACT": hook}):
        assert shown(row, "args") == [7, "****"]
        assert shown(row, "kwargs") == {"address": {"card": "****"}, "broken": REDACTED}
        assert shown(row, "result") == shown(row, "lock_key") == "****"
        assert "REDACT failed for argument 'broken'" in caplog.text
        caplog.clear()
        for text in all_that_is_shown(admin_client, row):
            assert SECRET not in text


def test_an_invalid_setting_is_an_error_of_check():
    for value, text in ((7, "is 7"), ("no.such.function", "cannot be imported")):
        with override_settings(DJANGO_PGLOCK={"REDACT": value}):
            [problem] = check_settings()
            assert (problem.id, text in problem.msg) == ("django_pglock.E001", True)
            with pytest.raises(ConfigurationError, match=text):
                shown(Task(args=[1], meta={}), "args")


def test_a_key_refuses_a_hidden_argument():
    rate = Rate(1, key="x:{card}")
    for options in ({"lock": "x:{card}"}, {"unique": Unique("{card.number}")}, {"fair": "{card}"}, {"rate": rate}):
        with pytest.raises(TaskOptionError, match="redact hides card"):
            task(redact=("card",), **options)(pay)
    with pytest.raises(TaskOptionError, match="redact hides card"):
        task(redact=("card",))(pay).using(lock="x:{card}")
    with pytest.raises(TaskOptionError, match="redact hides card"):
        task(redact=("card",), group=Group("x:{card}"))(in_group)
    for value in ("card", (7,), [None], None, 5, ""):
        with pytest.raises(TaskOptionError, match="redact is"):
            task(redact=value)(pay)
    with pytest.raises(TaskOptionError, match="a single call cannot change it"):
        task(pay).using(redact=True)


def recovered(text):
    """Return the card that a reader finds by trying all cards on each digest in a text."""
    for card in ("4000-0000-0000-0000", SECRET):
        call = to_json([7, card], what="It", sort_keys=True)
        if hashlib.sha256(call.encode()).hexdigest() in text:
            return card
    return None


@pytest.mark.parametrize("is_hook", [False, True])
@pytest.mark.parametrize("is_call", [False, True], ids=["decorated", "using"])
def test_the_digest_of_hidden_arguments_is_shown_nowhere(admin_client, is_hook, is_call):
    """A card number has few digits, so a reader could find it by computing the digest of each number."""
    redact = {} if is_hook else {"redact": ("card",)}
    function = task(**redact)(buy).using(unique=True) if is_call else task(unique=True, **redact)(buy)
    row = row_of(function, 7, SECRET)
    assert recovered(row.unique_key) is None, "nor would the stored key tell it, which an error of the server quotes"
    assert is_hook == (SECRET in row.unique_key)
    hook = {"DJANGO_PGLOCK": {"REDACT": lambda path, name, value: "****" if name == "card" else value}}
    with override_settings(**hook if is_hook else {}):
        assert shown(row, "unique_key") == REDACTED
        for text in all_that_is_shown(admin_client, row):
            assert recovered(text) is None
            assert row.unique_key not in text


@pytest.mark.parametrize("length", [1, 300, 500])
def test_a_shortened_key_does_not_show_a_hidden_argument(length):
    """The key of a long path and a digest ends in the digest of both."""
    function = task(unique=True, redact=("card",))(buy)
    row = row_of(function, 7, SECRET)
    row.unique_key = call_keys._shortened(function, f"{'x' * length} {'0a' * 32}")
    assert shown(row, "unique_key") == REDACTED


def test_a_call_is_found_again_while_the_secret_key_changes(settings):
    """Not all processes change ``SECRET_KEY`` at the same moment. The new ones have the old one as a fallback."""
    function = task(unique=True, redact=("card",))(buy)
    first = function.enqueue(7, SECRET)
    with override_settings(SECRET_KEY="another", SECRET_KEY_FALLBACKS=[settings.SECRET_KEY]):
        assert function.enqueue(7, SECRET).id == first.id
        assert function.enqueue(7, "4000-0000-0000-0000").id != first.id
    with override_settings(SECRET_KEY="another", SECRET_KEY_FALLBACKS=[]):
        assert function.enqueue(7, SECRET).id != first.id


def test_the_digest_of_a_function_that_hides_nothing_needs_no_secret():
    function = task(unique=True)(buy)
    first = function.enqueue(7, SECRET * 10)
    with override_settings(SECRET_KEY="another"):
        assert function.enqueue(7, SECRET * 10).id == first.id


def test_a_key_of_visible_arguments_is_shown():
    options = {"lock": "pay:{order_id}", "unique": Unique("pay:{order_id}"), "fair": "pay:{order_id}"}
    row = row_of(task(redact=("card",), **options)(buy), 7, SECRET)
    assert (shown(row, "lock_key"), shown(row, "fair_key")) == ("pay:7", "pay:7")
    assert shown(row, "unique_key") == f"{row.task_path} pay:7"
    assert shown(row_of(task(unique=True)(pay), 7, SECRET), "unique_key").startswith(f"{__name__}.pay ")


def test_a_key_of_the_time_before_its_argument_was_hidden_is_hidden_too(admin_client):
    row = row_of(task(lock="pay:{card}", fair="{card}", unique=Unique("{card}"))(buy), 7, SECRET)
    del registry._definitions[row.task_path]
    task(redact=("card",))(buy)
    assert {shown(row, field) for field in ("lock_key", "fair_key", "unique_key")} == {REDACTED}
    for text in all_that_is_shown(admin_client, row):
        assert SECRET not in text


def test_a_key_does_not_show_values_that_the_redact_setting_hides(admin_client):
    def hide(path, name, value):
        return "****" if name == "card" else value

    rows = [row_of(task(lock="pay:{card}", fair="{order_id}")(buy), number, SECRET) for number in range(3)]
    open_ones = [row_of(task(lock="open:{order_id}")(pay), number, None) for number in range(3)]
    with override_settings(DJANGO_PGLOCK={"REDACT": hide}):
        for row in rows:
            assert {shown(row, "lock_key"), shown(row, "fair_key")} == {REDACTED}
        for text in all_that_is_shown(admin_client, rows[0]):
            assert SECRET not in text
        out = io.StringIO()
        with CaptureQueriesContext(connection) as queries:
            call_command("locktasks", "list", "--json", stdout=out)
    assert [each["lock_key"] for each in json.loads(out.getvalue())] == [REDACTED] * 6
    assert len(queries) == 1, "the arguments come with the rows"
    with override_settings(DJANGO_PGLOCK={"REDACT": lambda path, name, value: "x" if name == "return" else value}):
        assert [shown(row, "lock_key") for row in open_ones] == ["open:0", "open:1", "open:2"]


def test_a_key_refuses_a_hidden_attribute_of_an_argument():
    for template in ("x:{order.card}", "x:{order.card.number}"):
        with pytest.raises(TaskOptionError, match="redact hides card"):
            task(redact=("card",), lock=template)(by_order)
    task(redact=("card",), lock="x:{order.pk}")(by_order)


@pytest.mark.parametrize(
    "value", [{4111: SECRET}, {SECRET}, f"{SECRET}\x00", f"{SECRET}\udcff", float("nan"), b"\xff4111"]
)
def test_the_error_of_refused_arguments_does_not_contain_hidden_values(value):
    function = task(redact=True, lock="pay:{order_id}")(pay)
    for call in ((1, value), (1, {"card": value}), (4111.5, "x")):
        with pytest.raises((TaskArgumentsError, ValueError)) as refusal:
            function.enqueue(*call)
        error = refusal.value
        while error is not None:
            assert "4111" not in str(error)
            error = error.__cause__
    assert not Task.objects.exists()


def test_the_task_page_shows_rows_with_malformed_columns(admin_client):
    task(redact=("card",))(pay)
    path = f"{__name__}.pay"
    for fields in (
        {"args": {"card": 1}}, {"kwargs": [1]}, {"meta": [1]}, {"meta": {"redact": 5}}, {"args": [1] * 9},
    ):  # fmt: skip
        row = Task.objects.create(queue="default", backend="default", task_path=path, worker=uuid4(), **fields)
        assert admin_client.get(reverse("admin:django_pglock_task_change", args=[row.pk])).status_code == 200


@pytest.mark.parametrize("way", ["raise", "replace", "twins"])
def test_the_error_of_a_duplicate_does_not_contain_the_key(way):
    options = {"on_conflict": "raise" if way == "twins" else way, "while_": "waiting"}
    function = task(redact=("card",), unique=Unique(**options))(buy)
    first = function.using(unique=Unique(while_="unfinished")).enqueue(7, SECRET) if way != "twins" else None
    with pytest.raises(DuplicateTask) as refused:
        enqueue_many(function, [(7, SECRET), (7, SECRET)]) if way == "twins" else function.enqueue(7, SECRET)
    said = f"{refused.value} {refused.value!r} {vars(refused.value)}"
    assert SECRET not in said
    assert recovered(said) is None
    assert refused.value.__cause__ is refused.value.__context__ is None, "no error of the server's, with its DETAIL"
    assert refused.value.result_id == ("" if first is None else first.id)


def test_commands_and_logs_do_not_show_hidden_keys(worker, eventually, caplog):
    caplog.set_level(logging.DEBUG, logger="django_pglock")
    function = task(unique=True, redact=True, lock="pay:{card}", fair="{card}")(cancel_or_fail)
    rows = [row_of(function, number, f"{SECRET}-{number}") for number in range(2)]
    worker(threads=1)
    eventually(lambda: Task.objects.filter(finished_at__isnull=False).count() == 2)
    out = io.StringIO()
    for command in (
        *(["retry", str(row.pk)] for row in rows),
        *([verb, "--task", "cancel_or_fail", "--dry-run"] for verb in ("retry", "cancel", "reset", "run-now")),
        *(["list", "--json"], ["list"], ["status", "--json"]),
        *([what, str(row.pk), "--json"] for what in ("show",) for row in rows),
    ):
        call_command("locktasks", *command, stdout=out, stderr=out)
    eventually(lambda: Task.objects.filter(finished_at__isnull=False).count() == 2)
    ours = [each for each in caplog.records if each.name.startswith("django_pglock")]
    assert {each.levelname for each in ours} >= {"ERROR", "INFO"}, "the ends of both were told"
    said = out.getvalue() + "".join(f"{vars(each)}{each.getMessage()}{each.exc_text}" for each in ours)
    assert SECRET not in said
    for row in rows:
        row.refresh_from_db()
        digest = row.unique_key.rpartition(" ")[2]
        assert len(digest) == 64
        assert digest not in said
