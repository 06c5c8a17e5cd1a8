"""The order in which unique keys are taken."""

from __future__ import annotations

from django_pglock.store.unique import _in_order_of_keys


def test_keys_are_taken_by_their_length_and_then_by_their_characters():
    """The statements take unique keys in this order. In another order, two transactions could deadlock."""
    assert _in_order_of_keys(["b", "aa", "é", "a", "B"]) == ["B", "a", "b", "é", "aa"]
