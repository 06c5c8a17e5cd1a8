"""Schedules of people: rows with a name, a function and its arguments, beside those of the code."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone

from django_pglock import task
from django_pglock.models import Schedule, Task
from django_pglock.store import schedules
from django_pglock.store.schedules import ScheduleKeeper
from django_pglock.tasks import registry
from tests.db.store.schedules import HOUR, NIGHTLY, decorate, of_code, schedule
from tests.sample import scheduled
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

PATH = "tests.sample.scheduled.with_argument"


@pytest.fixture(autouse=True)
def function(own_registry):
    return task(scheduled.with_argument)


def create(name="mine", **fields):
    return Schedule.objects.create(
        **{"name": name, "task_path": PATH, "args": [1], "expression": "every 1 h", **fields}
    )


def keep():
    return ScheduleKeeper("default").keep().tasks


def make_due(**rows):
    """Let the worker compute the next tick, and let this tick come. Returns its date."""
    keep()
    Schedule.objects.filter(**rows).update(next_at=Now() - timedelta(seconds=1))
    return Schedule.objects.filter(**rows).latest("next_at").next_at


# Ticks


@pytest.mark.parametrize(
    ("expression", "zone"), [("every 90 minutes", ""), ("30 7 * * 1-5", "Europe/Berlin"), ("0 * * * *", "")]
)
def test_a_tick_calls_the_function_with_the_arguments_of_the_row(expression, zone):
    row = create(args=[], kwargs={"number": {"of": 5}}, expression=expression, timezone=zone)
    assert keep() == []
    row.refresh_from_db()
    assert row.next_at > timezone.now(), "it counts from the moment when a worker reads it first"
    at = make_due()
    [made] = keep()
    run = Task.objects.get(pk=made)
    assert (run.task_path, run.args, run.kwargs) == (PATH, [], {"number": {"of": 5}})
    assert (run.meta["schedule"], run.meta["schedule_name"]) == (at.isoformat(), "mine")
    row.refresh_from_db()
    assert (row.last_at, row.last_task) == (at, made)
    assert keep() == []


def test_one_function_has_many_schedules_with_other_arguments():
    for number in range(3):
        create(f"of list {number}", args=[number])
    make_due()
    assert len(keep()) == 3
    assert sorted(Task.objects.values_list("args__0", flat=True)) == [0, 1, 2]


def test_unique_keys_and_locks_are_made_of_the_arguments():
    decorate(scheduled.with_argument, unique=True, lock="number:{number}")
    for name, number in (("one", 1), ("also one", 1), ("two", 2)):
        create(name, args=[number])
    make_due()
    assert len(set(keep())) == 2
    assert sorted(Task.objects.values_list("lock_key", flat=True)) == ["number:1", "number:2"]


def test_each_tick_is_enqueued_once_by_many_workers_while_people_edit(in_threads):
    """Four workers, and one person who saves an old copy of each row again and again."""
    for number in range(6):
        create(f"each {number}", args=[number], expression="every 0.1 s")

    def act(number):
        for _ in range(20):
            if number:
                keep()
            else:
                for each in rows:
                    each.note += "."
                    each.save()
        return number

    rows = list(Schedule.objects.all())
    in_threads(act, 5)
    ticks = list(Task.objects.values_list("args__0", "meta__schedule"))
    assert len(set(ticks)) == len(ticks) > 0
    assert set(Schedule.objects.values_list("note", flat=True)) == {"." * 20}


def test_a_row_that_a_program_has_inserted_is_read_as_others_are():
    """As by a data migration, whose models have no methods of ours."""
    Schedule.objects.bulk_create([Schedule(name="mine", task_path=PATH, args=[7], expression="every 1 day")])
    assert keep() == []
    assert Schedule.objects.get().next_at - timezone.now() > 23 * HOUR


def test_rows_that_no_worker_can_read_are_named_once_and_stop_no_other(caplog):
    caplog.set_level(logging.WARNING)
    create("good")
    rows = [("every 2 months", ""), ("60 * * * *", ""), ("0 3 * * *", "Europe/Atlantis"), ("0 0 31 2 *", "")]
    Schedule.objects.bulk_create(
        Schedule(name=f"bad {number}", task_path=PATH, args=[1], expression=text, timezone=zone)
        for number, (text, zone) in enumerate(rows)
    )
    keeper = ScheduleKeeper("default")
    keeper.keep()
    Schedule.objects.filter(name="good").update(next_at=Now())
    assert len(keeper.keep().tasks) == 1
    for number, _row in enumerate(rows):
        assert caplog.text.count(f"The schedule of bad {number}") == 1


def test_a_dump_has_the_schedules_of_people(tmp_path):
    row = create(note="for the auditors")
    make_due()
    path = tmp_path / "dump.json"
    call_command("dumpdata", "django_pglock.schedule", output=str(path))
    Schedule.objects.all().delete()
    call_command("loaddata", str(path))
    assert Schedule.objects.get().note == row.note
    assert len(keep()) == 1


def test_an_idle_worker_keeps_a_schedule_that_is_created_while_it_runs(worker, eventually):
    """And it stops when the row is deleted."""
    worker()
    decorate(scheduled.nightly)
    Schedule.objects.create(name="mine", task_path=NIGHTLY, kwargs={"name": "by people"}, expression="every 0.1 s")
    eventually(lambda: Effect.objects.filter(name="by people").count() > 2, why="it does not tick")
    Schedule.objects.all().delete()
    runs = Task.objects.all()
    eventually(lambda: not runs.exclude(status="SUCCESSFUL").exists())
    count = runs.count()
    Schedule.objects.create(name="next", task_path=PATH, args=[1], expression="every 0.1 s")
    eventually(lambda: runs.filter(task_path=PATH).count() > 2)
    assert runs.filter(task_path=NIGHTLY).count() == count


# Edits


def test_new_times_count_from_now_and_other_edits_leave_the_next_tick():
    row = create()
    keep()
    Schedule.objects.update(next_at=F("next_at") - HOUR / 2)
    row.refresh_from_db()
    before = row.next_at
    row.args, row.note = [2], "twice"
    row.save()
    keep()
    row.refresh_from_db()
    assert (row.next_at, row.args, row.note) == (before, [2], "twice")
    row.expression = "every 2 h"
    row.save()
    keep()
    row.refresh_from_db()
    assert row.next_at - timezone.now() > HOUR * 1.9


def test_new_times_never_run_the_tick_of_the_old_ones():
    """The tick is due, and a person makes it a schedule of next year."""
    create()
    make_due()
    row = Schedule.objects.get()
    row.expression, row.timezone = "0 0 1 1 *", "UTC"
    row.save()
    assert keep() == []
    assert Schedule.objects.get().next_at > timezone.now()


def test_an_edit_that_comes_between_the_read_of_a_due_row_and_its_tick_counts(monkeypatch):
    """The worker has read the row. Then a person commits other arguments, or another function."""
    create()
    make_due()
    take = schedules._take

    def edit_and_take(using, ticks, **changes):
        Schedule.objects.update(**changes)
        return take(using, ticks)

    monkeypatch.setattr(schedules, "_take", lambda using, ticks: edit_and_take(using, ticks, args=[9]))
    [made] = keep()
    assert Task.objects.get(pk=made).args == [9]
    make_due()
    monkeypatch.setattr(schedules, "_take", lambda using, ticks: edit_and_take(using, ticks, task_path="gone.f"))
    assert keep() == []


def test_a_row_that_is_deleted_meanwhile_is_not_written_again(monkeypatch):
    row = create()
    make_due()
    monkeypatch.setattr(schedules, "_following", lambda each: row.delete() and each.next_at + HOUR)
    assert keep() == []
    with pytest.raises(DatabaseError):
        Schedule(name="mine", task_path=PATH, args=[1], expression="every 5 s").save(update_fields=["note"])
    assert not Schedule.objects.exists()


def test_a_disabled_schedule_has_no_ticks_and_continues_with_the_next_one():
    row = create(is_enabled=False)
    make_due()
    assert keep() == []
    row.refresh_from_db()
    row.is_enabled = True
    row.save()
    assert keep() == []
    assert Schedule.objects.get(is_enabled=True).next_at > timezone.now()


def test_a_new_or_changed_schedule_tells_the_parents_of_idle_workers(monkeypatch):
    told = []
    monkeypatch.setattr("django_pglock.models.worker.wake_parents", told.append)
    row = create()
    row.save()
    assert told == ["default", "default"]


def test_run_now_gives_the_arguments():
    create(args=[5])
    [made] = Schedule.objects.all().run_now()
    assert Task.objects.get(pk=made).args == [5]


# What is refused


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"task_path": "shop.tasks.gone"}, "task_path", "knows no task function 'shop.tasks.gone'"),
        ({"task_path": "os.system"}, "task_path", "knows no task function"),
        ({"args": []}, "args", r"with_argument\(\) missing a required argument: 'number'"),
        ({"kwargs": {"colour": 1}}, "args", "unexpected keyword argument 'colour'"),
        ({"args": {"number": 1}}, "args", "a list"),
        ({"expression": "5 minutes"}, "expression", "'every 5 minutes', or the five fields"),
        ({"expression": "every 2 months"}, "expression", "not an interval"),
        ({"expression": "every 0.01 s"}, "expression", "at least 0.1"),
        ({"expression": "every 9999 days"}, "expression", "ten years"),
        ({"expression": "0 0 31 2 *"}, "expression", "not a cron expression"),
        ({"expression": "0 0 */31 * MON#5"}, "expression", "matches no date"),
        ({"expression": "0 3 * * *", "timezone": "Europe/Atlantis"}, "expression", "not a time zone"),
        ({"timezone": "Europe/Berlin"}, "expression", "an interval has no time zone"),
        ({"name": PATH}, "name", "stands in the code"),
        ({"name": NIGHTLY}, "name", "stands in the code"),
    ],
    ids=str,
)
def test_what_no_worker_could_enqueue_is_refused_by_its_field(fields, field, text):
    decorate(scheduled.nightly, every=HOUR)
    about = {"name": "mine", "task_path": PATH, "args": [1], "expression": "every 1 h", **fields}
    with pytest.raises(ValidationError, match=text) as refused:
        Schedule(**about).full_clean()
    assert list(refused.value.message_dict) == [field]
    with pytest.raises(ValidationError, match=text):
        Schedule.objects.create(**about)
    assert not Schedule.objects.exists()


def test_a_function_of_another_database_is_unknown():
    schedule = Schedule(name="mine", task_path=PATH, args=[1], expression="every 1 h")
    assert schedules.problems_of(schedule, "default") == {}
    assert list(schedules.problems_of(schedule, "elsewhere")) == ["task_path"]
    with pytest.raises(ValidationError, match="knows no task function"):
        schedule.save(using="elsewhere")


def test_a_name_is_taken_once_and_save_replaces_no_row():
    create(note="first")
    with pytest.raises(IntegrityError), transaction.atomic():
        Schedule(name="mine", task_path=PATH, args=[2], expression="every 5 s").save()
    assert Schedule.objects.get().note == "first"
    Schedule.objects.update_or_create(name="mine", defaults={"args": [3]})
    assert Schedule.objects.get().args == [3]


def test_a_schedule_of_the_code_is_not_saved():
    row = schedule()
    row.expression = "every 5 s"
    with pytest.raises(ValidationError, match="Change it there"):
        row.save()
    assert Schedule.objects.get(pk=NIGHTLY).expression == "every 3600 s"


# Functions that leave the code


def test_a_function_that_leaves_the_code_keeps_its_row_and_has_no_ticks(caplog):
    create()
    make_due()
    del registry._definitions[PATH]
    assert keep() == []
    assert Schedule.objects.get().next_at < timezone.now()
    task(scheduled.with_argument)
    assert len(keep()) == 1, "one for all ticks that were missed"


def test_a_tick_whose_arguments_no_longer_fit_fails_loudly(caplog):
    create()
    make_due()
    Schedule.objects.update(args=[1, 2, 3])
    keeper = ScheduleKeeper("default")
    assert keeper.keep().tasks == keeper.keep().tasks == []
    assert "The tick of mine" in caplog.text
    assert "too many positional arguments" in caplog.text
    assert Schedule.objects.get().next_at > timezone.now()


def test_a_schedule_of_the_code_gives_way_to_a_row_of_people_only_by_its_name(caplog):
    """A function got the path that a person had given as a name."""
    Schedule.objects.bulk_create([Schedule(name=NIGHTLY, task_path=PATH, args=[1], expression="every 1 h")])
    decorate(scheduled.nightly, every=60)
    keeper = ScheduleKeeper("default")
    keeper.keep(), keeper.keep()
    row = Schedule.objects.get()
    assert (row.task_path, row.expression) == (PATH, "every 1 h")
    assert caplog.text.count(f"{NIGHTLY} has no row") == 1


def test_a_schedule_whose_code_has_lost_it_stays_and_has_no_ticks():
    decorate(scheduled.nightly)
    of_code(NIGHTLY)
    assert keep() == []
    assert Schedule.objects.get().last_task is None
