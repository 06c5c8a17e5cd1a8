"""Tasks of many customers, each customer on one of two servers. For the settings qa.servers.shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from django_pglock import task
from django_pglock.keys import sha256_key


@task(lock="customer:{customer}")
def note(customer: int, number: int) -> None:
    """Append to a file: one write, so lines of several processes are not mixed."""
    with Path(os.environ["SHARDS_FILE"]).open("a") as file:
        file.write(f"{customer} {number}\n")


def enqueue(numbers: Sequence[int], *, backends: Sequence[str]) -> None:
    """Enqueue these numbers for each of twenty customers."""
    for number in numbers:
        for customer in range(20):
            backend = max(backends, key=lambda alias, key=customer: sha256_key(f"{alias}:{key}"))
            note.using(backend=backend).enqueue(customer, number)
