"""Converts the values of a task's row to JSON texts. No other module does this.

Arguments that cannot be stored are refused with an error that names them, before a row is written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from django.utils.functional import Promise

from django_pglock.errors import TaskArgumentsError, TaskResultError

#: With an odd number of backslashes, u0000 is a NUL character. With an even number it is ordinary text.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
#: Bytes of a result. PostgreSQL stores jsonb documents of at most 255 MiB.
MAX_RESULT = 100 * 1024 * 1024


def to_json(
    value: Any,
    *,
    what: str = "The value",
    most: int = MAX_RESULT,
    sort_keys: bool = False,
    kind: type[TaskArgumentsError | TaskResultError] = TaskArgumentsError,
) -> str:
    """Return ``value`` as the text of a JSON document that PostgreSQL's jsonb accepts.

    ``what`` names the value in messages, for example ``"Argument 'order' of shop.tasks.send"``. Raises an error of the
    class ``kind`` for types that JSON does not have, NaN and infinity, NUL characters, lone surrogates, and documents
    that are nested too deeply or have more than ``most`` bytes. The message has types and paths, but no values.
    """
    if type(value) in (list, dict) and not value:
        return "[]" if type(value) is list else "{}"
    try:
        text = _text_of(value, _SORTED if sort_keys else _ENCODER)
        size = len(text) if text.isascii() else len(text.encode())
    except RecursionError:
        raise kind(f"{what} is nested too deeply for JSON, or contains itself.") from None
    except UnicodeEncodeError as error:
        raise kind(f"{what} contains a lone surrogate, which is not a character.") from error
    except ValueError as error:
        raise kind(f"{what} cannot be stored as JSON: {_flaw_of(value)}.") from error
    if "\\u0000" in text and _NUL.search(text):
        raise kind(f"{what} contains a NUL character, which PostgreSQL cannot store.")
    if size > most:
        raise kind(f"{what} is {size:,} bytes long, more than {most:,}; store it elsewhere and pass a reference.")
    return text


#: Made once, because to make an encoder takes longer than to write a small document.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_SORTED = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
#: Values of exactly these types contain no other values.
_SCALARS = frozenset({str, int, float, bool, type(None)})
_ATOMS = frozenset({int, str})


def _text_of(value: Any, encoder: json.JSONEncoder) -> str:
    if type(value) is list and _ATOMS.issuperset(map(type, value)):
        # ``encode`` initialises a part of the encoder again for each list. This takes several times as long as to write
        # a few numbers and texts, and most calls have only these.
        return f"[{','.join([str(each) if type(each) is int else encoder.encode(each) for each in value])}]"
    return encoder.encode(_plain(value))


def _plain(value: Any) -> Any:
    """Return ``value`` with only dict, list and scalars in it, by the rules of django.tasks' ``normalize_json``."""
    kind = type(value)
    if kind is list:
        return [each if type(each) in _SCALARS else _plain(each) for each in value]
    if kind is dict:
        return {_plain_key(key): each if type(each) in _SCALARS else _plain(each) for key, each in value.items()}
    match value:
        case str() | bool() | int() | float() | None:
            return value
        case Mapping():
            return {_plain_key(key): _plain(each) for key, each in value.items()}
        case bytes():
            return value.decode()
        case Sequence():
            return [_plain(each) for each in value]
    raise ValueError("not a type of JSON")


def _plain_key(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError("not a key of JSON")  # noqa: TRY004
    return key


def _flaw_of(value: Any) -> str:
    """Return why a value is not valid JSON, where, and what to write: ``"it is a set; pass list() of it"``."""
    place, flaw = next(_flaws_in(value, ""))
    what, *hint = flaw.split("; ")
    return "; ".join([f"it contains {what} at {place}" if place else f"it is {what}", *hint])


def _flaws_in(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a value that are not valid JSON: where each is, and what it is."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            # A key may be data, for example an e-mail address, and must not be shown. An identifier counts as a name.
            is_name = isinstance(key, str) and key.isidentifier()
            yield from _flaws_in(part, f"{place}[{key!r}]" if is_name else f"{place}[…]")
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for number, part in enumerate(value):
            yield from _flaws_in(part, f"{place}[{number}]")
    if flaw := _flaw(value):
        yield place, flaw


#: What to write instead of objects that often occur in data.
HINTS = {
    **dict.fromkeys(("datetime", "date", "time"), "its isoformat()"),
    **dict.fromkeys(("Decimal", "UUID", "PosixPath"), "str() of it"),
    **dict.fromkeys(("set", "frozenset", "QuerySet", "generator"), "list() of it"),
    "timedelta": "its total_seconds()",
}


def _flaw(value: Any) -> str:
    """Return why a value is not valid JSON, apart from its parts; an empty text if it is."""
    kind = type(value).__name__
    match value:
        case Mapping():
            keys = sorted({type(key).__name__ for key in value if not isinstance(key, str)})
            return f"a {kind} with keys of type {', '.join(keys)} instead of str" if keys else ""
        case float():
            return "" if math.isfinite(value) else "NaN or infinity"
        case bytes():
            return "" if _is_utf8(value) else "bytes that are not UTF-8"
        case str() | int() | None | Sequence():
            return ""
        case Promise():
            return "a lazy object, such as a translation; pass str() of it"
    hint = "its primary key instead" if hasattr(value, "_meta") else HINTS.get(kind)
    return f"{with_article(kind)}; pass {hint}" if hint else with_article(kind)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def with_article(name: str) -> str:
    """Return the name of a class with its article: "an int", "a UUID", "a User"."""
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def from_json(text: str) -> Any:
    """Return the value of a JSON document that the database sent as text."""
    return json.loads(text)


def as_stored(text: str) -> Any:
    """Return the value of a JSON document as ``from_json`` returns it when jsonb has stored it.

    jsonb sorts the keys of an object, first by their length, and it has no negative zero and no exponents.
    """
    return json.loads(text, object_pairs_hook=_in_order_of_jsonb, parse_float=_number_of_jsonb)


def _in_order_of_jsonb(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(sorted(pairs, key=lambda pair: (len(key := pair[0].encode()), key)))


def _number_of_jsonb(text: str) -> float:
    # Python writes an exponent for numbers from 10 to the power of 16 on, which have no fraction.
    return int(Decimal(text)) if "e+" in text else float(text) + 0.0
