"""The numbers of workers."""

from __future__ import annotations

from django_pglock.keys.reserved import draw_number


def test_numbers_of_workers_have_31_bits_and_are_rarely_the_same():
    """Half of all larger numbers would be negative as an int4. Two of 200 such numbers are equal once in 100,000."""
    drawn = [draw_number() for _ in range(200)]
    assert all(0 <= number < 2**31 for number in drawn)
    assert len(set(drawn)) >= 199
    # With half as many numbers, twice as many pairs would be equal.
    assert max(drawn) >= 2**30
