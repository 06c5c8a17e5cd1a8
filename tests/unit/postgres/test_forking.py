"""A process that ends with its parent."""

from __future__ import annotations

import os

from django_pglock.postgres import forking as module


def test_a_child_whose_parent_has_died_before_it_could_ask_for_the_signal_ends(monkeypatch):
    codes = []
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError))
    monkeypatch.setattr(module.os, "_exit", codes.append)
    module.die_with_parent(os.getppid())
    assert codes == [], "without such a signal, the closed channel has to do"
    module.die_with_parent(1_000_000_000)
    assert codes == [1]
