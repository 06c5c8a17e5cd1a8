"""Names and keys."""

from __future__ import annotations

from datetime import date, datetime, timezone
from enum import Enum, IntEnum, IntFlag
from types import SimpleNamespace
from uuid import UUID

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import models
from django.test import override_settings
from django.test.utils import isolate_apps
from hypothesis import given
from hypothesis import strategies as st

from django_pglock.errors import ConfigurationError, LockKeyError
from django_pglock.keys import crc32_key, join, make_key, part_of, pglock_key, sha256_key
from django_pglock.keys.reserved import ALL, draw_number


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 5


class Flag(IntFlag):
    BOTH = 3


class Number(models.IntegerChoices):
    FIVE = 5


class Shade(str, Enum):
    PALE = "a:b%"


class Kind(models.TextChoices):
    MAIL = "mail:%"


def test_the_key_of_a_name_has_its_recorded_value():
    """A key must never change: half of a fleet would lock another number during a deploy.

    Computed with coreutils: ``printf %s checkout:42 | sha256sum``.
    """
    assert sha256_key("checkout:42") == int.from_bytes(bytes.fromhex("62f7a788f6f11290"), "big", signed=True)


def test_little_endian_and_crc_keys_for_migrations():
    big = sha256_key("a").to_bytes(8, "big", signed=True)
    assert pglock_key("a") == int.from_bytes(big, "little", signed=True)
    assert crc32_key("a") == 0xE8B7BE43 - 2**32
    assert crc32_key("b") == 0x71BEEFF9


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_key_fits_a_bigint(name):
    assert -(2**63) <= sha256_key(name) < 2**63


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("checkout",), "checkout"),
        (("a:b%",), "a:b%"),  # a single string is the name as it stands
        (("order", 5), "order:5"),
        (("order", "5:6%"), "order:5%3A6%25"),
        (("x", UUID(int=1)), "x:00000000-0000-0000-0000-000000000001"),
        (("x", date(2026, 1, 2)), "x:2026-01-02"),
        (("x", datetime(2026, 1, 2, tzinfo=timezone.utc)), "x:2026-01-02T00%3A00%3A00+00%3A00"),
        (("x", Colour.RED), "x:red"),
        (("x", Level.HIGH, Kind.MAIL), "x:5:mail%3A%25"),
        ((Colour.RED,), "red"),
        # A single part is the name itself.
        ((Shade.PALE,), "a:b%"),
        ((Kind.MAIL,), "mail:%"),
    ],
)
def test_the_parts_of_a_name_are_joined_with_colons_and_escaped(parts, name):
    assert make_key(*parts).name == name
    assert make_key(*parts).number == sha256_key(name)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=2, max_size=4))
def test_different_parts_never_make_the_same_name(parts):
    """A user's input that contains a colon must not reach another user's lock."""
    name = join(*parts)
    assert name.count(":") == len(parts) - 1
    assert [each.replace("%3A", ":").replace("%25", "%") for each in name.split(":")] == parts


@pytest.mark.parametrize("number", [5, Level.HIGH, Number.FIVE, Flag.BOTH, -5, 0, 2**63 - 1, -(2**63)])
def test_an_int_is_the_number_itself(number):
    """An IntEnum's member is an int, which PostgreSQL and other programs know by its number."""
    key = make_key(number)
    assert (key.name, key.number) == (f"#{int(number)}", int(number))
    assert type(key.number) is int


def test_a_number_and_its_digits_are_two_locks_with_different_texts():
    number, digits = make_key(5), make_key("5")
    assert number != digits
    assert (number.name, digits.name) == ("#5", "5")


@pytest.mark.parametrize("name", [Kind.MAIL, Shade.PALE])
def test_a_name_is_a_plain_string(name):
    """The text of an Enum's member may be that of its class; what goes into a message must be the name."""
    assert type(make_key(name).name) is str


@isolate_apps("tests.sample")
def test_a_proxy_and_its_concrete_model_name_one_lock():
    """A proxy and its concrete model share their rows. The model that declares the fields gives the name."""

    def model(name, base, **options):
        meta = type("Meta", (), {"app_label": "sample", **options})
        return type(name, (base,), {"Meta": meta, "__module__": __name__})

    Order = model("Order", models.Model)
    Paid = model("Paid", Order, proxy=True)
    Special = model("Special", Order)
    assert make_key(Paid(pk=7)) == make_key(Order(pk=7)) == make_key("sample.order:7")
    assert make_key("ship", Paid(pk=7)) == make_key("ship", Order(pk=7))
    assert make_key(Special(pk=7)) != make_key(Order(pk=7)), "a table of its own"


@pytest.mark.parametrize(
    "bad",
    [
        *(None, True, 1.5, "", b"x", (), object(), 2**63, -(2**63) - 1, "\udcff", ["a"]),
        # An unsaved instance, and two objects that have some attributes of an instance, as a ModelForm has.
        *(SimpleNamespace(pk=None, _meta=1), SimpleNamespace(_meta=1), SimpleNamespace(pk=1), ContentType),
    ],
)
def test_invalid_names_of_locks_are_refused(bad):
    with pytest.raises(LockKeyError):
        make_key(bad)


def test_the_error_for_a_model_names_the_class_of_models():
    """It has the attribute pk, as its instances have. The error was about a property."""
    with pytest.raises(LockKeyError, match="A ModelBase cannot be part"):
        make_key(ContentType)


def test_no_part_is_refused():
    for function in (make_key, join):
        with pytest.raises(LockKeyError, match="needs a name"):
            function()
    with pytest.raises(LockKeyError, match="empty"):
        part_of("")


@override_settings(DJANGO_PGLOCK={"NAMESPACE": "shop", "KEY_FUNCTION": "django_pglock.keys.pglock_key"})
def test_namespace_and_key_function_follow_the_settings():
    assert make_key("a").name == "shop:a"
    assert make_key("a").number == pglock_key("shop:a")
    assert make_key(5).number == 5, "a number is a number"


@override_settings(DJANGO_PGLOCK={"KEY_FUNCTION": "nope"})
def test_a_key_function_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError, match=r"\['KEY_FUNCTION'\] is 'nope', which cannot be imported"):
        make_key("a")


@isolate_apps("tests.sample")
def test_the_parts_of_a_composite_primary_key_are_parts_of_the_name():
    class Seat(models.Model):
        pk = models.CompositePrimaryKey("hall", "number")
        hall = models.TextField()
        number = models.IntegerField()

        class Meta:
            app_label = "sample"

    assert make_key(Seat(hall="a:b", number=5)).name == "sample.seat:a%3Ab:5"
    with pytest.raises(LockKeyError, match="has not been saved yet"):
        make_key(Seat(hall="a"))


def test_the_numbers_of_the_locks_are_three_and_never_change():
    """Workers of two releases may run at the same time, and the view of advisory locks has the numbers, too."""
    assert ALL == (0x70676C01, 0x70676C02, 0x70676C03)


def test_numbers_of_workers_have_31_bits_and_are_rarely_the_same():
    """Half of all larger numbers would be negative as an int4. Two of 200 such numbers are equal once in 100,000."""
    drawn = [draw_number() for _ in range(200)]
    assert all(0 <= number < 2**31 for number in drawn)
    assert len(set(drawn)) >= 199
    # With half as many numbers, twice as many pairs would be equal.
    assert max(drawn) >= 2**30
