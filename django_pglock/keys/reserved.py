"""The advisory locks that the package takes for itself, where ``lock`` cannot reach them.

PostgreSQL keeps advisory locks in two spaces: those of one 64-bit number, which are ``lock``'s, and those of two 32-bit
numbers, which ``pg_locks`` shows with ``objsubid = 2``. The locks of this file are in the second one. The first of the
two numbers says what the lock is for; a name of this file. So neither a name nor a raw number of a project can keep a
worker from its work, and the other way round.

The view of advisory locks has these numbers, too.
"""

from __future__ import annotations

import secrets

#: The worker that does the upkeep holds it. The second number is 0.
UPKEEP = 0x70676C01
#: An admission of tasks to a lock key holds it. The second number is from the key's SHA-256. Two keys may have the same
#: number: their admissions then wait for each other, each for one message to the server. An admission to several keys
#: takes them in the order of their numbers.
ADMISSION = 0x70676C02
#: A worker that lives holds it. The worker draws the second number, which stands in its row.
WORKER = 0x70676C03

ALL = (UPKEEP, ADMISSION, WORKER)


def draw_number() -> int:
    """Return a number for a worker. Never negative, so that ``pg_locks``, which knows no signs, shows the same."""
    return secrets.randbelow(2**31)
