"""Rare heartbeats: a worker learns of changes only by notifications."""

from tests.settings import *  # noqa: F403
from tests.settings import DJANGO_PGLOCK

DJANGO_PGLOCK = {**DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 600.0}
