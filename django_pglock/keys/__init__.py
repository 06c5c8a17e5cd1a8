"""From a lock's name to its key: the signed 64-bit number that PostgreSQL locks. Pure, apart from the settings.

A name is a string, or parts that are joined by colons: ``("order", 5)`` is ``"order:5"``. Colons and percent signs
inside a part are escaped, so that a value from outside cannot result in the name of another lock. The key is the first
eight bytes of the name's SHA-256, big-endian and signed. SQL can compute it as well::

    ('x' || encode(substr(sha256(convert_to('order:5', 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint

Names are not normalised: two spellings of "café" in Unicode are two locks.

``template`` has names with fields, such as ``"order:{order_id}"``, for decorators; ``reserved`` has the numbers of the
advisory locks that the package itself uses.
"""

from __future__ import annotations

import hashlib
import zlib
from datetime import date
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

from django_pglock.conf import get_settings, key_function
from django_pglock.errors import LockKeyError

#: The range of PostgreSQL's bigint.
SMALLEST, LARGEST = -(2**63), 2**63 - 1


class Key(NamedTuple):
    """A lock's name as people read it, ``#5`` for a raw number, and the number that PostgreSQL locks."""

    name: str
    number: int


def sha256_key(name: str) -> int:
    """Return the default key of a name: the same number as django-pgware's."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)


#: The default key function under the name that it has in django-pgware, for a rolling migration from there.
pgware_key = sha256_key


def pglock_key(name: str) -> int:
    """Return the key of a name in django-pglock (AmbitionEng): the same bytes, little-endian."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def crc32_key(name: str) -> int:
    """Return the key of a name in django-pglocks before version 2: a signed CRC-32. Collisions are likely."""
    return int.from_bytes(zlib.crc32(name.encode()).to_bytes(4, "big"), "big", signed=True)


def make_key(*parts: Any) -> Key:
    """Return the key of a name, or of the parts of a name.

    One string is the name, unchanged. One int is the number itself, for locks shared with other programs, and is shown
    as ``#5``. A member of a StrEnum counts as a string, a member of an IntEnum as an int. Several parts, or one part of
    another type, are escaped and joined. Raises ``LockKeyError`` for invalid parts.
    """
    return key_of(name_of(*parts))


def key_of(name: str | int) -> Key:
    """Return the key of a name or a number that ``name_of`` returned."""
    if isinstance(name, int):
        # The string "5" is the name of another lock, which is shown as 5.
        return Key(f"#{name}", name)
    if namespace := get_settings().NAMESPACE:
        name = f"{namespace}:{name}"
    return Key(name, key_function()(name))


def name_of(*parts: Any) -> str | int:
    """Return the name, or the number, for parts. Needs no settings, so that decorators can check names at import.

    Raises ``LockKeyError`` for invalid parts.
    """
    if len(parts) == 1:
        [only] = parts
        if isinstance(only, int) and not isinstance(only, bool):
            return _in_range(int(only))
        if isinstance(only, str):
            # An Enum class may define another ``__str__`` for its members.
            return _encodable(str.__str__(only))
    return _encodable(join(*parts))


def join(*parts: Any) -> str:
    """Return the escaped parts, joined by colons. Raises ``LockKeyError``."""
    if not parts:
        raise LockKeyError("A lock needs a name.")
    return ":".join(part_of(part) for part in parts)


def part_of(value: Any) -> str:
    """Return a value as an escaped part of a name.

    Accepts strings, ints, UUIDs, dates, members of an Enum and saved model instances (``app.model:pk``; for a proxy,
    the name of its concrete model; each value of a composite primary key is a part). Raises ``LockKeyError`` for all
    other values: None, for example, is the primary key of each anonymous user.
    """
    if isinstance(value, Enum):
        value = value.value
    if hasattr(value, "_meta") and hasattr(value, "pk") and not isinstance(value, type):
        return _part_of_model(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, UUID, date)):
        raise LockKeyError(
            f"A {type(value).__name__} cannot be part of a lock's name; use a string, int, UUID, date, Enum "
            "or saved model instance."
        )
    text = value.isoformat() if isinstance(value, date) else str(value)
    if not text:
        raise LockKeyError("An empty string cannot be part of a lock's name: every missing value would share one lock.")
    return text.replace("%", "%25").replace(":", "%3A")


def _part_of_model(instance: Any) -> str:
    # A composite primary key is a tuple.
    values = instance.pk if isinstance(instance.pk, tuple) else (instance.pk,)
    if any(value is None for value in values):
        raise LockKeyError(f"{instance!r} has not been saved yet, so it has no primary key to name a lock with.")
    # The instance of a proxy is the same row.
    return ":".join([instance._meta.concrete_model._meta.label_lower, *map(part_of, values)])


def _in_range(number: int) -> int:
    if not SMALLEST <= number <= LARGEST:
        raise LockKeyError(f"{number} does not fit into PostgreSQL's bigint; use a name instead.")
    return number


def _encodable(name: str) -> str:
    if not name:
        raise LockKeyError("An empty string cannot name a lock: every missing value would share it.")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise LockKeyError(f"{name!r} contains a lone surrogate, which is not a character.") from error
    return name
