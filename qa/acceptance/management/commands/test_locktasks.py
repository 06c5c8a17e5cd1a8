"""``manage.py locktasks`` in a script: exit codes, stdout and stderr, and no terminal to ask for confirmation."""

from __future__ import annotations

import json

import pytest

from django_pglock.models import Task
from qa.acceptance.management.commands.processes import locktasks
from tests.db.store.test_prune import make

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def test_locktasks_has_exit_codes_and_separate_output_and_errors():
    row = make("FAILED", days=0)
    code, out, err = locktasks("status", "--json", "--settings", "tests.settings")
    assert (code, err) == (0, "")
    assert json.loads(out)["queues"][0]["failed"] == 1

    code, out, err = locktasks("retry", "--all")
    assert code == 1
    assert out.startswith("1 task would run again.")
    assert "give --yes" in err
    assert "Traceback" not in err

    code, out, _err = locktasks("retry", row.pk)
    assert (code, out) == (0, "1 task will run again.\n")
    assert Task.objects.get().status == "READY"
