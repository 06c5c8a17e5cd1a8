"""The advisory locks that the package itself uses. Their keys cannot be used by ``lock``.

PostgreSQL has two key spaces for advisory locks: one 64-bit number, which ``lock`` uses, and two 32-bit numbers, which
``pg_locks`` shows with ``objsubid = 2``. The locks of this file are in the second space. The first of the two numbers
is one of the constants below, which says what the lock is for. So a name or a raw number of a project cannot block a
worker, and a worker cannot block a project.
https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS

The view of advisory locks has these numbers, too.
"""

from __future__ import annotations

import secrets

#: Held while due tasks are promoted, with the second number 0.
UPKEEP = 0x70676C01
#: Held while tasks are admitted to a lock key. The second number is from the key's SHA-256. If two keys have the same
#: number, their admissions wait for each other, for the time of one message to the server. An admission to several keys
#: takes the locks in the order of their numbers.
ADMISSION = 0x70676C02
#: Held by a worker for as long as it lives. The worker draws the second number and writes it into its row.
WORKER = 0x70676C03

ALL = (UPKEEP, ADMISSION, WORKER)


def draw_number() -> int:
    """Return a random number for a worker. It is not negative, because ``pg_locks`` shows keys as unsigned numbers."""
    return secrets.randbelow(2**31)
