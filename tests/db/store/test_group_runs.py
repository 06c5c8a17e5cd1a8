"""``Group(concurrency=n)``: n runs of one group key at a time."""

from __future__ import annotations

import threading
from itertools import accumulate

import pytest

from django_pglock import Group, enqueue_many, task
from django_pglock.errors import TaskOptionError
from django_pglock.models import Task
from django_pglock.store.admit import admit
from django_pglock.store.claim import claim_group
from django_pglock.store.outcome import Failed, Retried, Succeeded
from django_pglock.store.settle import settle
from tests.conftest import NEVER
from tests.db.store.endings import FAILURE, statuses
from tests.sample import grouped_tasks as grouped
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

#: How many runs of ``side_by_side`` there may be at once, and how many calls each has.
RUNS, LIMIT = 3, 2


def enqueue(count, key=1):
    enqueue_many(grouped.side_by_side, [{"key": key, "number": number} for number in range(count)])


@pytest.fixture
def begin(claim):
    """Begin a run as a thread of a worker does, and return its claims; none, if there may be no further run."""

    def begin(most=1):
        claims = claim(most)
        for first in claims[:1]:
            claims += claim_group("default", first, limit=LIMIT - 1, gather=0)
            admit("default", [first.lock_key])
        return claims

    return begin


def end(claims, *outcomes):
    settle("default", list(zip(claims, outcomes or [Succeeded()] * len(claims), strict=True)), claims[0].worker)
    admit("default", [claims[0].lock_key])


def test_each_run_takes_all_calls_that_wait_before_the_next_one_may_begin(begin):
    enqueue(8)
    assert statuses().count("READY") == 1, "otherwise each of three calls would begin a run of its own"
    runs = [begin(most=10) for _ in range(RUNS)]
    assert [len(each) for each in runs] == [LIMIT] * RUNS
    assert begin() == [], "three runs are in progress"
    assert statuses().count("BLOCKED") == 2
    end(runs[1])
    assert [each.id for each in begin()] == sorted(Task.objects.order_by("-id")[:2].values_list("pk", flat=True))
    assert begin() == []


def test_a_new_call_begins_a_run_beside_those_in_progress(begin):
    for number in range(RUNS):
        enqueue(1)
        assert len(begin()) == 1, number
    enqueue(1)
    assert begin() == []


def test_a_call_that_a_run_has_taken_counts_if_it_begins_the_next_run(begin):
    enqueue(2)
    end(begin(), Failed(FAILURE), Retried(FAILURE, 0))
    enqueue(2 * RUNS)
    runs = [begin() for _ in range(RUNS)]
    assert all(runs)
    assert begin() == []
    assert len(statuses()) == 2 + 2 * RUNS


def test_with_a_smaller_concurrency_no_run_begins_until_those_of_the_larger_one_have_ended(begin):
    """A deploy has changed the option."""
    enqueue(2 * RUNS)
    first, second, _ = [begin() for _ in range(RUNS)]
    Task.objects.filter(status="BLOCKED").update(concurrency=1)
    enqueue(1)
    Task.objects.filter(status="BLOCKED").update(concurrency=1)
    end(first)
    end(second)
    assert begin() == []


def test_concurrent_threads_never_run_more_than_may_run(begin, in_threads):
    """Calls are enqueued, runs begin and end at once, and some calls fail and are retried."""
    count, in_progress, most, guard = 120, [0], [0], threading.Lock()

    def work(number):
        if number < 2:
            for _ in range(count // 2):
                enqueue(1)
        while Task.objects.exclude(finished_at=None).count() < count:
            if not (claims := begin()):
                continue
            with guard:
                in_progress[0] += 1
                most[0] = max(most[0], in_progress[0])
            # The function: others begin and end meanwhile.
            Task.objects.filter(status="RUNNING").count()
            with guard:
                in_progress[0] -= 1
            is_refused = [each.attempt == 1 and each.id % 3 == 0 for each in claims]
            end(claims, *[Retried(FAILURE, 0) if refused else Succeeded() for refused in is_refused])

    in_threads(work, 7)
    assert statuses() == ["SUCCESSFUL"] * count
    assert 1 < most[0] <= RUNS


def runs_at_once():
    """Return the largest number of runs that were in progress at the same time, by the order of what they wrote."""
    steps = Effect.objects.filter(name__in=["begin", "end"]).order_by("id").values_list("name", flat=True)
    return max(accumulate(1 if name == "begin" else -1 for name in steps))


def test_workers_run_as_many_as_may_run_and_never_more(worker, eventually):
    for _ in range(2):
        worker(threads=4)
    enqueue(20)
    eventually(lambda: Effect.objects.filter(name="begin").count() == RUNS)
    # A run that begins while another one takes its calls may have fewer of them.
    assert Task.objects.filter(status="RUNNING", concurrency__gt=0).count() == RUNS
    assert "READY" not in statuses()
    Effect.objects.create(name="go on")
    eventually(lambda: statuses() == ["SUCCESSFUL"] * 20, seconds=NEVER)
    assert runs_at_once() == RUNS


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"group": "x", "concurrency": 2}, r"with concurrency\. Write Group\(…, concurrency=2\)"),
        ({"group": Group("x", concurrency=2), "lock": "y"}, "Group takes no concurrency"),
        ({"group": "x", "rate": "1/s"}, "group cannot be combined with rate"),
    ],
)
def test_what_cannot_be_combined_is_refused(options, why):
    with pytest.raises(TaskOptionError, match=why):
        task(**options)(lambda calls: None)


def test_a_wrong_concurrency_is_refused():
    with pytest.raises(TaskOptionError, match="Group: concurrency is 0; give a number from 1 to 32,767"):
        Group("x", concurrency=0)
