"""The rules by which a parent starts, replaces and kills its children, without processes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time

import pytest

from django_pglock.models import Worker
from django_pglock.worker.parent import crew as module
from django_pglock.worker.parent.crew import Child, in_words, is_stopped


@pytest.fixture
def pauses(monkeypatch):
    """Note after how many failures in a row a child is started again, which is at once."""
    failures = []
    monkeypatch.setattr(module, "pause_after", lambda number, *limits: failures.append(number) or 0.0)
    return failures


def test_a_child_that_ends_is_started_again_after_growing_pauses(make, pauses):
    """Also with exit code 0: a child that was not asked to end has to run."""
    children = make()
    for code in (-11, 1, 0):
        children.lose(code)
        children.until(lambda: children.all)
    assert pauses == [1, 2, 3]
    children.all[0].started_at -= module.STABLE_AFTER
    children.lose(-9)
    children.until(lambda: children.all)
    assert pauses == [1, 2, 3, 1], "it had lived for long enough"
    assert len(children.upkeep._ended) == 4, "the tasks of each are rescued"


def test_a_child_that_cannot_be_started_is_tried_again(make, pauses, caplog):
    children = make()
    children.fake.refuses = 2
    children.lose(1)
    children.until(lambda: len(children.fake.ends) == 2)
    assert pauses == [1, 2, 3]
    assert caplog.text.count("cannot be started (no more processes)") == 2


def test_a_parent_without_file_descriptors_starts_its_child_later(make, pauses, monkeypatch):
    children, pair = make(), socket.socketpair
    answers = iter([OSError("too many open files"), pair])

    def pair_or_refuse():
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer()

    monkeypatch.setattr(module.socket, "socketpair", pair_or_refuse)
    children.lose(1)
    children.until(lambda: len(children.fake.ends) == 2)
    assert pauses == [1, 2]


def test_a_draining_child_that_has_done_all_is_not_started_again(make, pauses):
    children = make(2, drain=True)
    children.lose(0)
    assert not children.are_gone
    children.tell(1, left_behind=["a task"])
    children.lose(75)
    assert children.are_gone
    assert children.left_behind == ["a task"]
    assert pauses == []
    crashed = make(drain=True)
    crashed.lose(-9)
    crashed.until(lambda: crashed.all)
    assert pauses == [1]


def test_a_child_that_asks_for_it_is_replaced_without_a_pause_and_before_it_has_ended(make, pauses):
    children = make()
    children.tell(replace=["it has run its maximum number of tasks"])
    children.tell(replace=["it uses 300 MiB of memory"])
    first, second = children.all
    assert (first.number, second.number) == (1, 1)
    assert not first.is_ending, "its last task may take long"
    children.tell(ending=True)
    assert (first.is_ending, second.is_ending) == (True, False)
    children.lose(1)
    assert children.all == [second]
    assert (pauses, children.have_failed) == ([], False)


def test_a_child_of_which_a_part_hangs_is_replaced_once_with_an_error(make, caplog):
    children = make()
    for _ in range(2):
        children.tell(replace=["The feeder has not responded for 70 s", logging.ERROR])
    assert len(children.all) == 2
    [record] = [each for each in caplog.records if "has not responded" in each.getMessage()]
    assert record.levelname == "ERROR"
    assert "Replacing worker-1[" in record.getMessage()


def test_a_child_that_starts_slowly_or_keeps_the_gil_is_not_killed(make, settings):
    children = make()
    children.all[0].heard_at -= 1000.0
    children.turn()
    assert children.fake.killed == []
    children.all[0].heard_at -= module.LONGEST_SILENCE
    children.turn()
    assert children.all[0].id.hex in children.fake.killed


def test_a_child_that_is_stopped_is_killed(make, monkeypatch, caplog):
    children = make()
    monkeypatch.setattr(module, "is_stopped", lambda pid: True)
    children.turn()
    assert children.fake.killed == [], "it was heard a moment ago"
    children.all[0].heard_at -= 1000.0
    children.turn()
    assert children.fake.killed[0] == children.all[0].id.hex
    assert "has been frozen for 1000 s. It is killed." in caplog.text
    assert children.beats() == [], "nobody beats for it any more"
    killed = len(children.fake.killed)
    children.turn()
    assert len(children.fake.killed) > killed, "the first signal may have been lost"


def test_what_has_not_ended_in_time_is_killed(make, monkeypatch, caplog):
    monkeypatch.setattr(module, "MARGIN", 0.05)
    for begin in (
        lambda each: each.end(drain=True),
        lambda each: each.end(drain=False),
        lambda each: each.tell(ending=True),
    ):
        children = make(grace=0.01)
        begin(children)
        children.until(lambda: children.fake.killed)  # noqa: B023
        children.lose(-9)
    assert caplog.text.count("has not ended in time") == 3


def test_a_child_that_has_closed_its_channel_and_stays_is_killed(make, monkeypatch, caplog):
    """A function has closed all files of its process: no message comes any more."""
    monkeypatch.setattr(module, "MARGIN", 0.05)
    children = make()
    children.fake.ends[0].close()
    children.until(lambda: children.fake.killed)


def test_an_attempt_that_keeps_its_child_from_ending_it_has_the_child_killed(make, monkeypatch, caplog):
    children, now = make(grace=0.0), time.monotonic()
    monkeypatch.setattr(module, "OVERRUN_MARGIN", 1000.0)
    children.fake.ends[0].send(began=[2, 1, now - 10_000.0])
    children.tell(ended=[2, 1])
    children.tell(began=[1, 1, now - 500.0])
    children.tell(began=[3, 2, now - 400.0])
    children.tell(began=[4, 1, now + 10_000.0])
    assert children.fake.killed == [], "the child has a moment to end by itself"
    monkeypatch.setattr(module, "OVERRUN_MARGIN", 450.0)
    children.turn()
    assert "runs a task long after its timeout" in caplog.text
    assert children.all[0].overruns == [(1, 1), (3, 2)], "the time of both is over"


def test_also_a_child_that_ends_and_is_killed_has_overrun_attempts(make, monkeypatch):
    """Otherwise they would count as lost, and would run again as often as poison tasks."""
    monkeypatch.setattr(module, "MARGIN", 0.05)
    children = make()
    children.tell(began=[1, 1, time.monotonic()])
    children.end(drain=True)
    children.until(lambda: children.fake.killed)
    assert children.all[0].overruns == [(1, 1)]


def test_a_stop_starts_nothing_any_more(make, monkeypatch):
    monkeypatch.setattr(module, "pause_after", lambda number, *limits: 0.02)
    children = make(2)
    children.lose(1)
    children.end(drain=True)
    assert [each for each in children.heard_by(1) if "start" not in each] == [{"drain": True}]
    children.tell(1, replace=["it uses too much memory"])
    time.sleep(0.03)
    children.turn()
    children.lose(0)
    assert children.are_gone
    assert not children.have_failed


def test_a_second_stop_gives_tasks_back(make):
    children = make()
    children.end(drain=True)
    children.end(drain=False)
    assert children.heard_by()[1:] == [{"drain": True}, {"end": True}]
    children.lose(-signal.SIGKILL)
    assert children.have_failed


def test_a_child_that_ends_has_its_wake_ups_passed_to_another(make):
    """Its row says that it sleeps until the next heartbeat."""
    children = make(3)
    first, second, third = children.all

    def woken_by(worker):
        children.wake(str(worker), "mail", 0)
        return [number for number in range(3) if {"wake": ["mail", 0]} in children.heard_by(number)]

    assert woken_by(second.id) == [1]
    children.tell(1, ending=True)
    assert woken_by(second.id) == [0]
    children.kill(first, "is frozen")
    assert woken_by(first.id) == [2]
    assert woken_by("one that has ended") == [2]
    children.end(drain=True)
    assert woken_by(third.id) == []


@pytest.mark.parametrize("length", [1, 80, 255, 5000])
def test_names_fit_the_table_and_tell_workers_of_one_host_apart(make, monkeypatch, length):
    monkeypatch.setattr(module.socket, "gethostname", lambda: "h" * length)
    children = make()
    [beat] = children.beats()
    assert len(beat.name) <= Worker._meta.get_field("name").max_length
    assert len(beat.hostname) <= Worker._meta.get_field("hostname").max_length
    assert Child(1, None).id != Child(1, None).id


def test_exit_codes_in_words():
    assert [in_words(code) for code in (0, 75, -9, -99)] == [
        "with exit code 0", "with exit code 75", "by SIGKILL", "by signal 99",
    ]  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="asks /proc")
def test_a_process_that_has_ended_is_not_stopped():
    assert not is_stopped(os.getpid())
    assert not is_stopped(2**30)
