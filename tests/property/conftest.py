"""What both walks may use."""

from __future__ import annotations

import pytest


@pytest.fixture
def patient(settings):
    """Take no simulated worker for dead because a walk takes long."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 600.0, "HEARTBEAT_LIMIT": 2000.0}
