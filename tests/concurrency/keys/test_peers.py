"""A rolling migration from another package: its locks and ours exclude each other, in either order."""

from __future__ import annotations

from contextlib import contextmanager

import pglock
import pytest
from django.test import override_settings
from django_pg_utils import advisory_lock as pgware_lock
from django_pg_utils.locks._lock import resolve_lock_id
from django_pglocks import advisory_lock as pglocks_lock

from django_pglock import try_lock
from django_pglock.keys import crc32_key, pglock_key, pgware_key
from django_pglock.testing import hold
from tests.concurrency.locks.test_handle import locks_held

pytestmark = pytest.mark.django_db(transaction=True)

NAMES = ["report", "order:5", "50% off", "café", "x" * 1000, "a'b\"c", "\u202e", "tests.module.function"]
#: The numbers that the other packages made of these names. No release of this package may change them.
GOLDEN = {
    "report": (-8908523020745054052, -7140429637593506172, -1003522172),
    "order:5": (-8173632149667894618, -6473267390763462258, -497205408),
    "café": (-8858723660289998967, -8503059731156496507, -1733475659),
    "50% off": (-6663736938441250757, 4280829206669460899, 514054461),
}


@contextmanager
def pglock_1_8(name):
    with pglock.advisory(name, timeout=0) as acquired:
        yield acquired


@contextmanager
def pgware_1_0(name):
    with pgware_lock(name, wait=False) as acquired:
        yield acquired


@contextmanager
def pglocks_1_0(name):
    with pglocks_lock(name, wait=False) as acquired:
        yield acquired


PEERS = [
    (pglock_1_8, "django_pglock.keys.pglock_key"),
    (pgware_1_0, "django_pglock.keys.sha256_key"),
    (pgware_1_0, "django_pglock.keys.pgware_key"),
    (pglocks_1_0, "django_pglock.keys.crc32_key"),
]


def is_free_for_ours(in_threads, name):
    def work(_):
        with try_lock(name) as held:
            return bool(held)

    return in_threads(work, 1)[0]


@pytest.mark.parametrize(("peer", "function"), PEERS)
@pytest.mark.parametrize("name", [*NAMES, 4711, -1])
def test_a_lock_and_a_lock_of_another_package_exclude_each_other(peer, function, name, in_threads):
    with override_settings(DJANGO_PGLOCK={"KEY_FUNCTION": function}):
        with peer(name) as acquired:
            assert acquired
            assert not is_free_for_ours(in_threads, name)
        assert is_free_for_ours(in_threads, name)
        with hold(name), peer(name) as acquired:
            assert not acquired
        with peer(name) as acquired:
            assert acquired
    assert locks_held() == 0


@pytest.mark.parametrize(("name", "numbers"), GOLDEN.items())
def test_key_functions_make_the_recorded_numbers_and_those_of_the_other_packages(name, numbers):
    assert (pgware_key(name), pglock_key(name), crc32_key(name)) == numbers
    assert resolve_lock_id(name) == numbers[0]
    high, low = pglock.advisory_id(name)
    assert (high << 32) | low == numbers[1]


def test_another_key_function_does_not_exclude(in_threads):
    """Without this difference the tests above could not fail."""
    with pglock_1_8("report"):
        assert is_free_for_ours(in_threads, "report")
