"""Heartbeats so rare that what a worker learns meanwhile has come by notification."""

from tests.settings import *  # noqa: F403
from tests.settings import DJANGO_PGLOCK

DJANGO_PGLOCK = {**DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 600.0, "HEARTBEAT_LIMIT": 2000.0}
