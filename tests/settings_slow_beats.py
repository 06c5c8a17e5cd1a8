"""Signs of life so rare that what is heard meanwhile was told by notification."""

from tests.settings import *  # noqa: F403
from tests.settings import DJANGO_PGLOCK

DJANGO_PGLOCK = {**DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 600.0, "HEARTBEAT_LIMIT": 2000.0}
