"""What the tests of running tasks may use."""

from __future__ import annotations

import copy

import pytest
from django.db import connection, connections


@pytest.fixture
def change_settings():
    """Change settings of the connections that other threads make from now on."""
    settings, own = connections.settings["default"], connection.settings_dict
    before = copy.deepcopy(settings)
    connection.settings_dict = before
    yield settings.update
    connection.settings_dict = own
    connection.close_pool()
    settings.update(before)
