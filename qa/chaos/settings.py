"""What a worker under test is configured with: everything at its default, unless the fault needs something else.

Some faults are applied inside of the process, before anything else runs in it: ``CHAOS_CLOCK`` is by how many seconds
its clock is wrong, ``CHAOS_MEMORY`` how many MiB it may take.
"""

import json
import os
import resource
import time
from datetime import timedelta
from pathlib import Path

from django.utils import timezone

from tests.settings import *  # noqa: F403

DJANGO_PGLOCK = json.loads(os.environ.get("CHAOS_PGLOCK", "{}"))


def _shift_clock(seconds: int) -> None:
    """Shift all clocks that this package, Django and the log read; only C code could read another one."""
    true_time, true_time_ns, true_now = time.time, time.time_ns, timezone.now
    time.time = lambda: true_time() + seconds
    time.time_ns = lambda: true_time_ns() + seconds * 10**9
    timezone.now = lambda: true_now() + timedelta(seconds=seconds)


def _limit_memory(megabytes: int) -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = taken + megabytes * 1024**2
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# Processes crash here on purpose.
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if _seconds := int(os.environ.get("CHAOS_CLOCK", "0")):
    _shift_clock(_seconds)
if _megabytes := int(os.environ.get("CHAOS_MEMORY", "0")):
    _limit_memory(_megabytes)
