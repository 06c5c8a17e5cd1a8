"""The times of heartbeats, with an interval of 3 s and a limit of 30 s, as by default."""

from __future__ import annotations

import pytest
from django.test import override_settings

from django_pglock.conf import get_settings
from django_pglock.worker.liveness.timing import HeartbeatTiming, heartbeat_timing
from tests.settings import DJANGO_PGLOCK

TIMING = HeartbeatTiming(interval=3.0, limit=30.0, silent_after=27.0)


def test_the_times_follow_from_the_settings():
    with override_settings(DJANGO_PGLOCK={**DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 2.0}):
        assert heartbeat_timing() == (2.0, 20.0, 18.0)
    assert heartbeat_timing().interval == get_settings().HEARTBEAT_INTERVAL


def test_timeouts_are_shares_of_the_interval_and_of_the_limit():
    assert (TIMING.statement_timeout, TIMING.longest_pause, TIMING.answer_timeout) == (10.0, 1.5, 1.5)


@pytest.mark.parametrize(
    ("age", "is_connected", "is_stale"),
    [(27.0, True, False), (27.1, True, True), (6.0, False, False), (6.1, False, True)],
)
def test_an_old_heartbeat_is_stale_sooner_without_a_session(age, is_connected, is_stale):
    assert TIMING.is_stale(age, is_connected=is_connected) == is_stale


@pytest.mark.parametrize(
    ("age", "is_resting", "is_late"), [(4.4, False, False), (4.5, False, True), (13.4, True, False), (13.5, True, True)]
)
def test_a_heartbeat_is_late_after_one_and_a_half_intervals_or_three_times_as_long_in_a_rest(age, is_resting, is_late):
    assert TIMING.is_late(age, is_resting=is_resting) == is_late
