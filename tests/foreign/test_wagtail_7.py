"""Wagtail 7. See ``wagtail_tasks.py``."""

import django
import wagtail

from tests.foreign.wagtail_tasks import *  # noqa: F403


def test_it_is_wagtail_7():
    assert wagtail.VERSION[0] == 7
    assert django.VERSION[:2] == (5, 2)
