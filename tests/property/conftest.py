"""Fixtures for both walks."""

from __future__ import annotations

import pytest


@pytest.fixture
def slow_beats(settings):
    """No simulated worker counts as dead in a long walk."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 600.0}
