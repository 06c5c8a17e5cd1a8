"""``manage.py locktasks stats``: a table and JSON of what has ended lately."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from io import StringIO

import pytest
from django.core.management import call_command

from django_pglock.store.numbers import Counts, add_numbers, bucket_of

pytestmark = pytest.mark.django_db


def stats(*arguments):
    call_command("locktasks", "stats", *arguments, stdout=(out := StringIO()))
    return out.getvalue()


@pytest.fixture
def history():
    now = int(datetime.now(timezone.utc).timestamp() // 60 * 60)
    # The present minute, and two hours before.
    sent, charged, late = Counts(succeeded=118, failed=1, lost=1), Counts(retried=6), Counts(succeeded=1)
    sent.wait[bucket_of(0.002)] = sent.run[bucket_of(0.5)] = 120
    charged.run[bucket_of(90)] = 6
    add_numbers("default", {(now, "mail", "app.send"): sent, (now, "mail", "app.charge"): charged})
    add_numbers("default", {(now - 7200, "bulk", "app.send"): late})


def test_stats_prints_a_line_for_each_function(history):
    head, *lines = [line.split() for line in stats().splitlines()]
    assert head[:3] == ["QUEUE", "TASK", "PER"]
    assert [line[:7] for line in lines] == [
        ["mail", "app.send", "2.0", "118", "1", "0", "1"],
        ["mail", "app.charge", "0.1", "0", "0", "6", "0"],
    ]
    assert lines[0][7:9] == ["0.002", "s"]
    assert lines[1][7:9] == ["-", "-"]
    assert float(lines[1][-2]) == pytest.approx(90, rel=0.42)


def test_json_has_seconds(history):
    [sent, charged] = json.loads(stats("--json"))
    assert (sent["queue"], sent["task_path"], sent["succeeded"], sent["per_minute"]) == ("mail", "app.send", 118, 2.0)
    assert sent["run_p95"] == pytest.approx(0.5, rel=0.42)
    assert (charged["retried"], charged["wait_p50"]) == (6, None)


def test_stats_filters_by_task_and_queue_and_adds_up_by_queue(history):
    def shown(*arguments):
        found = json.loads(stats("--json", *arguments))
        return [(each["queue"], each["task_path"], each["succeeded"] + each["retried"]) for each in found]

    assert shown("--task", "charge") == [("mail", "app.charge", 6)]
    assert shown("--task", "app.send", "--hours", "24") == [("mail", "app.send", 118), ("bulk", "app.send", 1)]
    assert shown("--queue", "bulk", "--hours", "3") == [("bulk", "app.send", 1)]
    assert shown("--queue", "unknown") == []


def test_stats_without_ended_attempts_prints_a_sentence():
    assert stats() == "No attempt has ended in this time. Workers write their counts once a minute.\n"
