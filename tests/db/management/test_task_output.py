"""How ``locktasks`` prints tasks and queues."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from django.core.management import CommandError
from django.db.models.functions import Now

from django_pglock.management.tables import QUEUES, lines_of_fields
from django_pglock.management.terminal import table
from django_pglock.models import Attempt
from django_pglock.store.count import COUNTED
from tests.db.management.commands.test_locktasks import failed, locktasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_show_prints_everything_with_tracebacks_and_escapes_control_characters():
    row = failed(args=["\x1b[2J"], queue="ma\x1bil", log="one\x1b\ntwo")
    Attempt.objects.create(
        task=row, number=1, worker=uuid4(), started_at=Now(), finished_at=Now(), outcome="FAILED",
        exception_path="builtins.ValueError", traceback="Traceback\n  line \x1b[31m",
    )  # fmt: skip
    text = locktasks("show", row.pk)
    assert "builtins.ValueError" in text
    assert "    Traceback\n      line ?[31m" in text
    assert "log:\n    one?\n    two\n" in text
    assert "\x1b" not in text
    found = json.loads(locktasks("show", row.pk, "--json"))
    assert (found["id"], found["failures"][0]["number"]) == (row.pk, 1)
    with pytest.raises(CommandError, match=f"There is no task {row.pk + 1}"):
        locktasks("show", row.pk + 1)


def test_a_count_that_was_stopped_has_a_plus_sign():
    row = {**dict.fromkeys(map(str.lower, COUNTED), 0), "queue": "ma\x1bil", "failed": 10_000, "at_least": ["failed"]}
    lines = table(QUEUES, [{**row, "oldest_ready": 75.0, "paused_at": None}]).splitlines()
    assert lines[1].split() == ["ma?il", "0", "0", "0", "0", "10000+", "75", "s", "-"]


def test_a_field_is_one_line_whatever_it_has():
    fields = {"queue": "a\nb", "args": ["\x1b", "é"], "retries": 0, "result": None}
    lines = list(lines_of_fields(fields))
    assert [line.partition(":")[2].strip() for line in lines] == ["a?b", '["\\u001b", "é"]', "0"]
