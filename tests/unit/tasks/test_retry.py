"""Back-off."""

from __future__ import annotations

import math
import pickle
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_pglock import Cancel, Retry, Snooze
from django_pglock.errors import TaskOptionError
from django_pglock.tasks import options
from django_pglock.tasks.retry import MAX_DELAY, Exponential, Linear, delay_after, duration


def after(backoff, failures=1):
    return delay_after(backoff, failures=failures, exception=ValueError("no"), result=lambda: "the result")


def test_a_number_and_a_timedelta_wait_that_long():
    assert after(5) == 5
    assert after(timedelta(minutes=1)) == 60


def test_linear_and_exponential_grow_as_they_say():
    assert [after(Linear(2, cap=5), n) for n in (1, 2, 3)] == [2, 4, 5]
    assert [after(Exponential(1, 2, cap=5, jitter=False), n) for n in (1, 2, 3, 4)] == [1, 2, 4, 5]


def test_a_small_factor_also_grows_up_to_the_cap():
    slow = Exponential(1, 1.05, jitter=False)
    assert [round(slow.delay(n), 6) for n in (66, 100, 200)] == [round(1.05**65, 6), round(1.05**99, 6), 600]
    assert Exponential(0, 1000, jitter=False).delay(1000) == 0


def test_the_waits_of_policies_without_options():
    assert [Exponential(jitter=False).delay(n) for n in (1, 2, 3, 20)] == [1, 2, 4, 600]
    assert [Linear(1000).delay(n) for n in (1, 3, 4)] == [1000, 3000, 3600]
    assert Exponential().jitter


def test_a_policy_takes_timedeltas_as_well_as_seconds():
    second = timedelta(seconds=1)
    assert Linear(second, cap=2 * second).delay(3) == 2
    assert Exponential(second, cap=3 * second, jitter=False).delay(3) == 3


def test_full_jitter_draws_from_the_whole_range():
    """Otherwise tasks that failed together would be tried again at the same time."""
    drawn = [Exponential(100).delay(1) for _ in range(200)]
    assert min(drawn) < 20
    assert max(drawn) > 80


@pytest.mark.parametrize("nonsense", ["x", None, -1, math.nan, math.inf, True])
@pytest.mark.parametrize(
    ("policy", "name"),
    [(Linear, "step"), (Linear, "cap"), (Exponential, "base"), (Exponential, "cap")],
)
def test_an_invalid_wait_of_a_retry_policy_is_refused(policy, name, nonsense):
    needed = {"step": 1} if policy is Linear else {}
    with pytest.raises(TaskOptionError, match=f"{policy.__name__}: {name} is"):
        policy(**{**needed, name: nonsense})


@pytest.mark.parametrize("nonsense", ["x", None, 0, -1, math.nan, math.inf, True, 1001])
def test_an_invalid_factor_of_a_retry_policy_is_refused(nonsense):
    with pytest.raises(TaskOptionError, match="Exponential: factor is"):
        Exponential(factor=nonsense)
    assert Exponential(factor=1000, jitter=False).delay(2) == 600


@given(failures=st.integers(1, 10**6), base=st.floats(0, 1e6), factor=st.floats(1, 1000), cap=st.floats(0, 1e6))
def test_full_jitter_stays_between_zero_and_its_bound(failures, base, factor, cap):
    """Also for a task that failed a million times: the power must not overflow."""
    assert 0 <= Exponential(base, factor, cap).delay(failures) <= cap


def test_a_function_is_asked_with_exception_and_result():
    seen = []

    def backoff(error, result):
        seen.append((type(error), result))
        return timedelta(seconds=7)

    assert after(backoff) == 7
    assert seen == [(ValueError, "the result")]


def test_no_wait_is_longer_than_postgresql_can_write():
    assert timedelta(days=3650).total_seconds() == MAX_DELAY
    assert after(lambda error, result: 1e300) == MAX_DELAY
    assert duration("period", MAX_DELAY) == MAX_DELAY
    with pytest.raises(TaskOptionError, match="the maximum is ten years"):
        duration("period", MAX_DELAY + 1)


@pytest.mark.parametrize("nonsense", [-1, math.nan, math.inf, "soon", None, True, timedelta(seconds=-1), Linear])
def test_an_invalid_backoff_is_refused(nonsense):
    with pytest.raises(TaskOptionError, match="backoff"):
        options.backoff("backoff", nonsense)


@pytest.mark.parametrize("word", [Retry, Cancel])
def test_the_reason_is_the_text_however_it_is_given(word):
    assert str(word("no such order")) == str(word(reason="no such order")) == "no such order"
    assert str(word()) == ""


def test_the_wait_of_retry_and_snooze_is_a_keyword_in_seconds():
    assert Retry(after=timedelta(minutes=1)).seconds == 60
    assert Retry("later").seconds is None
    with pytest.raises(TypeError):
        Retry("later", 5)
    assert (Snooze(5).seconds, str(Snooze(after=5))) == (5, "for 5")
    assert pickle.loads(pickle.dumps(Retry("later", after=5))).seconds == 5


def test_a_subclass_need_not_set_a_wait():
    class LockedElsewhere(Snooze):
        def __init__(self):
            """Does not call ``Snooze.__init__``."""

    assert LockedElsewhere().seconds == 60
