"""The functions that convert arguments and results to JSON."""

from __future__ import annotations

import json
from datetime import date
from types import MappingProxyType, SimpleNamespace
from uuid import UUID

import pytest
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from django_pglock.error_reading import MAX_TEXT, message_of, storable
from django_pglock.errors import TaskArgumentsError
from django_pglock.tasks.arguments import MAX_RESULT, from_json, to_json

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")), inner)
    ),
    max_leaves=20,
)


@given(json_values)
def test_json_values_are_unchanged_after_a_round_trip(value):
    assert from_json(to_json(value, what="it")) == value


def test_the_text_of_a_document_is_short_and_never_changes():
    """A unique key may be the digest of the sorted text. If the text changed, a deploy would change the key."""
    value = {"b": [1, 2.5, None], "a": "ä"}
    assert to_json(value, what="it") == '{"b":[1,2.5,null],"a":"ä"}'
    assert to_json(value, what="it", sort_keys=True) == '{"a":"ä","b":[1,2.5,null]}'
    assert to_json([1, -2, "ä", '"', "a\nb"], what="it") == '[1,-2,"ä","\\"","a\\nb"]'
    assert (to_json([], what="it"), to_json({}, what="it"), to_json("", what="it")) == ("[]", "{}", '""')


def test_a_document_may_be_so_many_bytes_long_and_not_more():
    """Bytes, not characters: an umlaut has two."""
    for value in ("a" * 10, "ä" * 5):
        assert to_json(value, what="it", most=12)
        with pytest.raises(TaskArgumentsError, match="it is 12 bytes long, more than 11"):
            to_json(value, what="it", most=11)
    assert MAX_RESULT == 104_857_600, "PostgreSQL stores no document of 256 MiB"


def test_tuples_and_bytes_become_what_django_tasks_makes_of_them():
    assert from_json(to_json((1, b"two", {"three": (4,)}), what="it")) == [1, "two", {"three": [4]}]
    assert to_json(MappingProxyType({"a": (1,)}), what="it") == '{"a":[1]}'


def loop():
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (date(2026, 1, 1), "it is a date"),
        ("a\x00b", "NUL"),
        ("\udcff", "surrogate"),
        (loop(), "contains itself"),
    ],
)
def test_an_argument_that_cannot_be_stored_is_refused_by_name(value, reason):
    """The error comes before any row is written, and its message names the argument."""
    for sort_keys in (False, True):
        with pytest.raises(TaskArgumentsError, match=f"^Argument x.*{reason}"):
            to_json(value, what="Argument x", sort_keys=sort_keys)


@pytest.mark.parametrize(
    ("value", "flaw"),
    [
        ({"rows": [1, {"at": date(2026, 1, 1)}]}, "it contains a date at ['rows'][1]['at']; pass its isoformat()"),
        (({"a@b.example": {1}},), "it contains a set at [0][…]; pass list() of it"),
        ([float("nan")], "it contains NaN or infinity at [0]"),
        ([1, -float("inf")], "it contains NaN or infinity at [1]"),
        (gettext_lazy("Yes"), "it is a lazy object, such as a translation; pass str() of it"),
        (SimpleNamespace(_meta=1, pk=7), "it is a SimpleNamespace; pass its primary key instead"),
        (b"\xff", "it is bytes that are not UTF-8"),
        ({1: "one", "two": 2, None: 3}, "it is a dict with keys of type NoneType, int instead of str"),
        (SimpleNamespace(pk=7), "it is a SimpleNamespace"),
        (UUID(int=1), "it is a UUID; pass str() of it"),
        (OSError(), "it is an OSError"),
    ],
)
def test_a_flaw_is_described_with_its_place_and_without_data(value, flaw):
    """A key that is no identifier may be data."""
    with pytest.raises(TaskArgumentsError) as error:
        to_json(value, what="It")
    assert str(error.value) == f"It cannot be stored as JSON: {flaw}."


def test_a_text_about_nul_is_no_nul():
    """A backslash and four zeros are five harmless characters."""
    assert json.loads(to_json("\\u0000", what="it")) == "\\u0000"


def test_traces_are_made_storable_whatever_they_contain():
    assert storable("nul \x00 surrogate \udcff") == "nul \\x00 surrogate \\udcff"


def test_a_long_text_keeps_its_beginning_and_its_end():
    assert storable("x" * MAX_TEXT) == "x" * MAX_TEXT
    half = MAX_TEXT // 2
    expected = "a" * half + "\n… 1,000 characters left out …\n" + "b" * half
    assert storable("a" * half + "-" * 1000 + "b" * half) == expected


def test_the_message_of_an_exception_is_one_short_line():
    class Unreadable(Exception):
        def __str__(self):
            raise ValueError

    assert message_of(ValueError("a\n  b\x00")) == "ValueError: a b\ufffd"
    assert message_of(ValueError()) == "ValueError"
    assert message_of(ValueError("x" * 300 + "y")) == "ValueError: " + "x" * 300
    assert message_of(Unreadable()).endswith("Unreadable: its message cannot be read (ValueError)")
