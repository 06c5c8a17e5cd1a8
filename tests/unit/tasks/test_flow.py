"""Retry, Snooze and Cancel: their texts and their waits."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest

from django_pglock import Cancel, Retry, Snooze


@pytest.mark.parametrize("word", [Retry, Cancel])
def test_the_reason_is_the_text_however_it_is_given(word):
    assert str(word("no such order")) == str(word(reason="no such order")) == "no such order"
    assert str(word()) == ""


def test_the_wait_of_retry_and_snooze_is_a_keyword_in_seconds():
    assert Retry(after=timedelta(minutes=1)).seconds == 60
    assert Retry("later").seconds is None
    with pytest.raises(TypeError):
        Retry("later", 5)
    assert (Snooze(5).seconds, str(Snooze(after=5))) == (5, "for 5")
    assert pickle.loads(pickle.dumps(Retry("later", after=5))).seconds == 5


def test_a_subclass_need_not_set_a_wait():
    class LockedElsewhere(Snooze):
        def __init__(self):
            """Does not call ``Snooze.__init__``."""

    assert LockedElsewhere().seconds == 60
