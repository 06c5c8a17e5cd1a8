"""Keys: from the name of a lock to the number that PostgreSQL locks.

- ``key``: names, and the functions that compute the number of a name.
- ``template``: names with fields, such as ``"order:{order_id}"``, for decorators.
- ``reserved``: the numbers of the advisory locks that the package itself uses.
"""

from django_pglock.keys.key import (
    Key,
    crc32_key,
    key_of,
    make_key,
    name_of,
    pglock_key,
    pgware_key,
    sha256_key,
)

__all__ = [
    "Key",
    "crc32_key",
    "key_of",
    "make_key",
    "name_of",
    "pglock_key",
    "pgware_key",
    "sha256_key",
]
