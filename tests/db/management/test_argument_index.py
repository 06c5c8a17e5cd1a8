"""``manage.py locktasks index``."""

from __future__ import annotations

import pytest

from django_pglock.store.argument_index import drop_argument_index, has_argument_index
from tests.db.management.commands.test_locktasks import locktasks
from tests.db.store.test_argument_index import nothing_is_known as nothing_is_known  # a fixture

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_command_says_whether_it_has_changed_anything():
    assert locktasks("index", "--arguments").startswith("The index was created: ")
    assert has_argument_index("default")
    assert locktasks("index", "--arguments") == "The index is there already.\n"
    assert locktasks("index", "--arguments", "--drop") == "The index was dropped.\n"
    assert not drop_argument_index("default")
    assert locktasks("index", "--arguments", "--drop") == "There is no index.\n"
