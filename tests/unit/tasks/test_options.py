"""Values of options: valid ones, invalid ones, and their normalized form."""

from __future__ import annotations

import logging
import math
from dataclasses import FrozenInstanceError, fields
from datetime import timedelta
from functools import partial

import pytest

from django_pglock import Exponential, Group, Linear, Rate, Unique
from django_pglock.errors import TaskOptionError
from django_pglock.tasks import options
from django_pglock.tasks.fields import MOST_CONCURRENT, OPTIONS
from django_pglock.tasks.options import MOST_IN_GROUP
from django_pglock.tasks.queues import LONGEST_QUEUE, OWN_QUEUE, check_queue_name, check_text, covers, is_served
from django_pglock.tasks.states import UniqueScope


@pytest.mark.parametrize(
    ("check", "most"),
    [
        (partial(OPTIONS["concurrency"].check, "concurrency"), MOST_CONCURRENT),
        (lambda number: Group("all", limit=number), MOST_IN_GROUP),
        (lambda number: Rate(number), 1_000_000),
        (lambda number: Rate(1, burst=number), 1_000_000),
    ],
    ids=["concurrency", "limit", "count", "burst"],
)
def test_a_number_has_a_smallest_and_a_largest_value(check, most):
    """The largest concurrency is that of PostgreSQL's smallint; a larger one would fail when the row is written."""
    check(1)
    check(most)
    for wrong in (0, most + 1, True, 1.5, "1", None):
        with pytest.raises(TaskOptionError, match=f"give a number from 1 to {most:,}"):
            check(wrong)


@pytest.mark.parametrize(
    ("unique", "scope", "seconds"),
    [
        (Unique(), UniqueScope.WAITING, None),
        (Unique(while_="unfinished"), UniqueScope.UNFINISHED, None),
        (Unique(period=60), UniqueScope.PERIOD, 60),
        (Unique(while_="unfinished", period=timedelta(minutes=2)), UniqueScope.PERIOD, 120),
    ],
)
def test_the_scope_of_a_unique_key_is_its_period_or_what_it_waits_for(unique, scope, seconds):
    assert (unique.scope, unique.seconds) == (scope, seconds)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"while_": "running"}, "while_ is 'running'"),
        ({"on_conflict": "ignore"}, "on_conflict is 'ignore'"),
        ({"period": 0}, "0 seconds"),
        ({"period": -1}, "period is -1"),
        ({"on_conflict": "replace", "while_": "unfinished"}, "a running task cannot be replaced"),
        ({"on_conflict": "replace", "period": 60}, "a running task cannot be replaced"),
    ],
)
def test_an_invalid_unique_is_refused(options, text):
    with pytest.raises(TaskOptionError, match=text):
        Unique(**options)
    assert Unique(on_conflict="replace").on_conflict == "replace"


def test_the_time_to_gather_is_seconds_or_a_timedelta():
    assert Group("all").seconds == 0
    assert Group("all", gather=timedelta(minutes=1)).seconds == 60
    with pytest.raises(TaskOptionError, match="gather is -1"):
        Group("all", gather=-1)


def test_a_rate_is_the_time_from_one_token_to_the_next():
    assert Rate(10).interval == 0.1
    assert Rate(4, per=timedelta(minutes=1)).interval == 15
    with pytest.raises(TaskOptionError, match="per is 0"):
        Rate(1, per=0)
    with pytest.raises(TaskOptionError, match="per is 0"):
        Rate.parse("10/0s")


@pytest.mark.parametrize(
    ("rate", "portion"),
    [(Rate(1), 1), (Rate(10), 1), (Rate(11), 2), (Rate(21), 2), (Rate(1000), 50), (Rate(1000, burst=70), 70)],
)
def test_a_high_rate_lets_through_the_tokens_of_50_milliseconds_at_once(rate, portion):
    """Otherwise a rate of thousands a second would need thousands of polls a second."""
    assert rate.portion == portion


@pytest.mark.parametrize("count", [1, 5, 10, 11, 21, 100, 999])
@pytest.mark.parametrize("burst", [1, 3, 1200])
@pytest.mark.parametrize("per", [0.01, 0.5, 1, 60])
def test_a_rate_and_its_burst_allow_no_more_starts_in_its_time_than_they_say(count, burst, per):
    """A bucket of ``portion`` tokens: all of them, and then one at the end of each interval."""
    rate = Rate(count, per=per, burst=burst)
    assert rate.portion - 1 + math.ceil(per / rate.interval - 1e-9) == count + burst - 1


@pytest.mark.parametrize(
    ("text", "count", "per"),
    [("10/s", 10, 1), ("100/m", 100, 60), ("5/h", 5, 3600), ("2/d", 2, 86_400), ("1/30s", 1, 30), ("7/2h", 7, 7200)],
)
def test_a_rate_is_read_from_a_short_text(text, count, per):
    rate = Rate.parse(text)
    assert (rate.count, rate.per) == (count, per)


@pytest.mark.parametrize("text", ["", "10", "10/", "/s", "10/x", "10 / s", "-1/s", "10/s ", "12345678/s", "1/123456s"])
def test_a_text_that_is_no_rate_is_refused(text):
    with pytest.raises(TaskOptionError, match="write it as"):
        Rate.parse(text)


def test_a_short_form_stands_for_its_class():
    assert options.unique("unique", True) == Unique()
    assert options.unique("unique", "{a}") == Unique("{a}")
    assert options.unique("unique", False) is None
    assert options.group("group", "{a}") == Group("{a}")
    assert options.rate("rate", "1/s") == Rate(1)
    for name, value in (("unique", Unique(period=1)), ("group", Group("all")), ("rate", Rate(2))):
        assert OPTIONS[name].check(name, value) is value


def test_the_least_level_of_what_is_captured_may_be_zero():
    """0 is equal to False, but it is ``logging.NOTSET``: everything."""
    levels = [options.log_level("capture_logs", value) for value in (logging.NOTSET, True, "INFO", 30, False)]
    assert levels == [0, 0, 20, 30, None]
    for wrong in (-1, 1.5, "LOUD"):
        with pytest.raises(TaskOptionError, match="capture_logs is"):
            options.log_level("capture_logs", wrong)


@pytest.mark.parametrize("make", [Unique, partial(Group, "a"), partial(Rate, 1), Exponential, partial(Linear, 1)])
def test_the_value_of_an_option_is_equal_to_another_and_never_changes(make):
    """It is checked once, when it is made, and calls of many threads share it."""
    value = make()
    assert value == make()
    assert hash(value) == hash(make())
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field.name, None)


# The names of queues, and which worker serves which queue.


def test_a_name_has_as_many_characters_as_the_column_takes():
    for name in ("q", "q" * LONGEST_QUEUE):
        check_queue_name(name)
    for name, length in (("", "0"), ("q" * (LONGEST_QUEUE + 1), "129"), ("q" * 2000, "2,000")):
        with pytest.raises(ValueError, match="must have 1 to 128 characters") as error:
            check_queue_name(name)
        assert str(error.value).endswith(f"not {length}: {name[:40]!r}.")


@pytest.mark.parametrize("bad", ["\x00", chr(0xD800), chr(0xDFFF)])
def test_a_text_that_postgresql_does_not_store_is_refused(bad):
    for check in (check_queue_name, lambda text: check_text(text, "A queue's name")):
        with pytest.raises(ValueError, match="A queue's name contains a NUL character or a lone surrogate") as error:
            check(f"mail{bad}" + "x" * 60)
        assert str(error.value).endswith(f"cannot store: {(f'mail{bad}' + 'x' * 35)!r}.")
    check_text("\ud7ff\ue000 é", "A text")


def test_a_pattern_covers_names_and_longer_prefixes():
    names = ["mai", "mail", "mail-bulk", "mail*", "ma*", "*"]
    assert [name for name in names if covers("mail*", name)] == ["mail", "mail-bulk", "mail*"]
    assert [name for name in names if covers("mail", name)] == ["mail"]
    assert [name for name in names if covers("*", name)] == names


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ([], ["default", "mail", "mail-bulk"]),
        (["mail"], ["mail"]),
        (["mail*=3"], ["mail", "mail-bulk"]),
        (["default", "mail-bulk=2"], ["default", "mail-bulk"]),
        (["--exclude mail"], ["default", "mail-bulk"]),
        (["mail*", "--exclude mail-*"], ["mail"]),
        (["--mail"], []),
    ],
)
def test_the_queues_on_the_command_line_say_what_a_worker_serves(asked, served):
    assert [name for name in ("default", "mail", "mail-bulk") if is_served(name, asked)] == served
    assert is_served(OWN_QUEUE, asked)
