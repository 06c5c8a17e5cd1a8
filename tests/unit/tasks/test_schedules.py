"""The ticks of schedules, also on the days on which clocks change."""

from __future__ import annotations

import random
import sys
from datetime import datetime, timedelta, timezone
from itertools import islice
from zoneinfo import ZoneInfo

import pytest

from django_pglock import task
from django_pglock.errors import TaskOptionError
from django_pglock.tasks.schedules import LONGEST_EXPRESSION, Timing, cron_ticks, timing_of
from tests.sample import scheduled

pytestmark = pytest.mark.usefixtures("own_registry")

UTC = timezone.utc
MINUTE = timedelta(minutes=1)
#: The days on which clocks change, of zones that differ in how: by an hour, at midnight, by half an hour.
CHANGES = [
    ("Europe/Berlin", datetime(2026, 3, 29)),
    ("Europe/Berlin", datetime(2026, 10, 25)),
    ("America/Havana", datetime(2026, 3, 8)),
    ("America/Havana", datetime(2026, 11, 1)),
    ("Australia/Lord_Howe", datetime(2026, 4, 5)),
    ("Australia/Lord_Howe", datetime(2026, 10, 4)),
]


def ticks_of_day(expression, zone, day):
    """All ticks from the midnight before a local day to the one after it, asked for at once."""
    start, end = (each.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC) for each in (day, day + timedelta(days=1)))
    ticks = []
    for tick in cron_ticks(expression, zone, start - timedelta(seconds=1)):
        if tick >= end:
            return ticks
        ticks.append(tick)
    return ticks


def local(ticks, zone="Europe/Berlin"):
    return [tick.astimezone(ZoneInfo(zone)).strftime("%H:%M%z") for tick in ticks]


def test_a_fixed_time_that_is_skipped_comes_after_the_gap_and_one_that_comes_twice_comes_once():
    at_half_past_two = [local(ticks_of_day("30 2 * * *", "Europe/Berlin", day)) for _, day in CHANGES[:2]]
    assert at_half_past_two == [["03:00+0200"], ["02:30+0200"]]


def test_two_fixed_times_that_one_gap_skips_are_one_tick_after_it():
    assert local(ticks_of_day("15,45 2 * * *", "Europe/Berlin", CHANGES[0][1])) == ["03:00+0200"]


def test_every_hour_is_every_hour_that_passes():
    spring, autumn = (ticks_of_day("0 * * * *", "Europe/Berlin", day) for _, day in CHANGES[:2])
    assert (len(spring), len(autumn)) == (23, 25)
    assert local(spring)[:4] == ["00:00+0100", "01:00+0100", "03:00+0200", "04:00+0200"]
    assert local(autumn)[1:5] == ["01:00+0200", "02:00+0200", "02:00+0100", "03:00+0100"]


@pytest.mark.parametrize(("zone", "day"), CHANGES, ids=str)
def test_each_tick_comes_once_and_none_is_lost(zone, day):
    """By a calculation of its own: all minutes of the day, by the clock on the wall."""
    start = day.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    minutes = [start + number * MINUTE for number in range(26 * 60)]
    minutes = [each for each in minutes if each.astimezone(ZoneInfo(zone)).date() == day.date()]
    walls = [each.astimezone(ZoneInfo(zone)).strftime("%H:%M") for each in minutes]
    passing = [each for each, wall in zip(minutes, walls, strict=True) if wall.endswith(("00", "15", "30", "45"))]
    assert ticks_of_day("*/15 * * * *", zone, day) == passing
    fixed = ticks_of_day("15,45 0-23 * * *", zone, day)
    for wall in {f"{hour:02}:{minute}" for hour in range(24) for minute in (15, 45)}:
        # The first minute with that local time, or the first later minute.
        meant = next(each for each, name in zip(minutes, walls, strict=True) if name >= wall)
        assert meant in fixed
    assert len(fixed) == len(set(fixed)) <= 48


@pytest.mark.parametrize(("zone", "day"), CHANGES, ids=str)
@pytest.mark.parametrize("expression", ["30 2 * * *", "0 * * * *", "*/20 1-3 * * *", "15 0,1,2,3 * * *", "0 0 * * *"])
def test_the_next_tick_does_not_depend_on_when_it_is_computed(expression, zone, day):
    """A worker that is late, or starts in the middle of the hour that comes twice, neither repeats nor leaves out."""
    ticks = ticks_of_day(expression, zone, day)
    start = day.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    moments = [start + timedelta(seconds=random.randrange(5 * 3600)) for _ in range(60)]
    for moment in [*moments, *ticks]:
        expected = next((tick for tick in ticks if tick > moment), None)
        found = Timing(expression, zone).following(start, moment)
        assert found == expected or (expected is None and found > ticks[-1])


def test_every_continues_in_whole_steps_from_its_tick():
    tick = datetime(2026, 3, 29, tzinfo=UTC)
    timing = Timing("every 300 s")
    for late, steps in ((0, 1), (1, 1), (299, 1), (300, 2), (301, 2), (86_400, 289)):
        assert timing.following(tick, tick + timedelta(seconds=late)) == tick + timedelta(seconds=300 * steps)
    assert Timing("every 0.2 s").following(tick, tick) == tick + timedelta(milliseconds=200)


def test_the_timing_of_a_schedule_depends_on_the_code_and_the_current_settings(settings):
    decorated = task(cron="0 3 * * *")(scheduled.nightly)
    settings.TIME_ZONE = "Asia/Tokyo"
    assert timing_of(decorated) == ("0 3 * * *", "Asia/Tokyo")
    settings.TIME_ZONE = "Europe/Berlin"
    assert timing_of(decorated) == ("0 3 * * *", "Europe/Berlin")
    assert timing_of(task(cron="0 3 * * *", timezone="UTC")(scheduled.nightly)) == ("0 3 * * *", "UTC")
    for seconds, text in (
        (timedelta(days=20), "every 1728000 s"),
        (0.2, "every 0.2 s"),
        (1234567.25, "every 1234567.25 s"),
    ):
        assert timing_of(task(every=seconds)(scheduled.nightly)) == (text, "")


def test_ticks_of_rare_expressions_are_found():
    after = datetime(2026, 1, 1, tzinfo=UTC)
    assert [tick.year for tick in islice(cron_ticks("0 0 29 2 *", "UTC", after), 2)] == [2028, 2032]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cron": "0 3 * *"}, "five fields"),
        ({"cron": "0 0 3 * * *"}, "five fields"),
        ({"cron": "@daily"}, "five fields"),
        ({"cron": 5}, "five fields"),
        ({"cron": ",".join(["1"] * 200) + " * * * *"}, "255 characters"),
        ({"cron": "60 3 * * *"}, "Bad minute"),
        ({"cron": "0 0 31 2 *"}, "not a cron expression"),
        ({"cron": "0 0 */31 * MON#5"}, "matches no date"),
        ({"cron": "0 3 * * *", "every": 5}, "not both"),
        ({"timezone": "Europe/Berlin"}, "needs cron"),
        ({"every": 5, "timezone": "Europe/Berlin"}, "needs cron"),
        ({"cron": "0 3 * * *", "timezone": "Europe/Atlantis"}, "'Europe/Atlantis', which is not a time zone"),
        ({"cron": "0 3 * * *", "timezone": "Europe"}, "which is not a time zone"),
        ({"cron": "0 3 * * *", "timezone": "../etc"}, "which is not a time zone"),
        ({"cron": "0 3 * * *", "timezone": ""}, "which is not a time zone"),
        ({"cron": "0 3 * * *", "timezone": 2}, "which is not a time zone"),
        ({"every": 0}, "at least 0.1"),
        ({"every": timedelta(days=5000)}, "ten years"),
    ],
)
def test_an_invalid_schedule_is_refused_when_the_function_is_decorated(options, text):
    with pytest.raises(TaskOptionError, match=text) as refused:
        task(**options)(scheduled.nightly)
    assert "@task on tests.sample.scheduled.nightly" in str(refused.value)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (scheduled.with_argument, {}),
        (scheduled.with_argument, {"group": "{number}"}),
        (scheduled.with_keyword, {}),
        (scheduled.with_context, {}),
    ],
)
def test_a_function_that_needs_arguments_is_refused(function, options):
    with pytest.raises(TaskOptionError, match=f"{function.__name__}: a schedule calls the function without arguments"):
        task(every=5, **options)(function)


def test_the_shortest_period_and_the_longest_expression_are_taken():
    assert task(every=0.1)(scheduled.nightly).every == 0.1
    longest = f"0{',1' * 123} * * * *"
    assert len(longest) == LONGEST_EXPRESSION
    assert task(cron=longest)(scheduled.nightly).cron == longest


def test_a_function_that_needs_none_is_taken():
    assert task(every=5, takes_context=True)(scheduled.with_context).every == 5
    assert task(every=5, group="all")(scheduled.with_argument).every == 5
    assert task(every=timedelta(minutes=5), lock="nightly:{name}")(scheduled.nightly).every == 300


def test_without_cronsim_cron_says_what_to_install_and_every_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(TaskOptionError, match=r"nightly: cron needs cronsim; pip install django-pglock-tasks\[cron\]"):
        task(cron="0 3 * * *")(scheduled.nightly)
    assert task(every=5)(scheduled.nightly).every == 5
