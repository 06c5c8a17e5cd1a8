"""What the commands print if the terminal has a poor encoding."""

from __future__ import annotations

import io
import sys

import pytest
from django.core.management import load_command_class
from django.utils.translation import override


@pytest.mark.parametrize("name", ["locks", "locktasks", "runlockworker", "withlock"])
def test_a_character_that_the_encoding_does_not_have_is_printed_as_an_escape(name, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with override("fr"), pytest.raises(SystemExit) as ended:
        load_command_class("django_pglock", name).run_from_argv(["manage.py", name, "--help"])
    sys.stdout.flush()
    assert ended.value.code == 0
    assert rb"\xe9" in sys.stdout.buffer.getvalue()
