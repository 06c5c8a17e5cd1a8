"""The numbers of the package's own locks."""

from __future__ import annotations

from django_pglock.keys.reserved import ALL, draw_number


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
