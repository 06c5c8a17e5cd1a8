"""``manage.py systems``: what it lists and refuses. Its plays are run by the tests of each system."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from example_project.systems import NAMES
from tests.sample.tasks import nothing


def test_without_a_name_it_lists_the_systems():
    out = StringIO()
    call_command("systems", stdout=out)
    assert [line.split()[0] for line in out.getvalue().splitlines()] == list(NAMES)


def test_an_unknown_name_is_refused():
    with pytest.raises(CommandError, match="nothing"):
        call_command("systems", "nothing")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_others_are_not_deleted(name):
    nothing.enqueue()
    with pytest.raises(CommandError, match=r"has rows in django_pglock_task\. .* --erase"):
        call_command("systems", name)
