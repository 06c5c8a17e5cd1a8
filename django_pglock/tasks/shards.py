"""Shards: chooses the backend, and with it the server, for the tasks of a key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from django_pglock.keys import name_of


def backend_for(*key: Any, backends: Sequence[str]) -> str:
    """Return the alias of the backend for the tasks of a key: ``charge.using(backend=backend_for(customer.pk, ...))``.

    ``key`` has the same parts as the name of a lock. ``backends`` are aliases of ``TASKS``, in any order. The same key
    and backends give the same alias in each process. If a backend is added, it takes its share of the keys from all
    others, and no other key moves; if one is removed, only its keys move. This is rendezvous hashing: D. Thaler and
    C. Ravishankar, "Using name-based mappings to increase hit rates", 1998.

    Raises ``LockKeyError`` for invalid parts of a name, and ``ValueError`` without backends.
    """
    if isinstance(backends, str) or not backends:
        raise ValueError(f"backends is {backends!r}; give the aliases of at least one backend, as a list.")
    name = str(name_of(*key))
    return max(backends, key=lambda alias: (_weight(alias, name), alias))


def _weight(alias: str, name: str) -> bytes:
    # The length separates the two, so that no other pair has the same text.
    return hashlib.sha256(f"{len(alias)}:{alias}:{name}".encode()).digest()
