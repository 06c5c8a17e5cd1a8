"""Keys: from the name of a lock to the number that PostgreSQL locks.

- ``key``: names, and the functions that make a number of a name.
- ``template``: names with fields, ``"order:{order_id}"``, that decorators take.
- ``reserved``: the numbers of the advisory locks that the package takes for itself.
"""

from django_pglock.keys.key import (
    Key,
    crc32_key,
    join,
    key_of,
    make_key,
    name_of,
    part_of,
    pglock_key,
    pgware_key,
    sha256_key,
)

__all__ = [
    "Key",
    "crc32_key",
    "join",
    "key_of",
    "make_key",
    "name_of",
    "part_of",
    "pglock_key",
    "pgware_key",
    "sha256_key",
]
