"""Wagtail 7. See ``wagtail_tasks.py``."""

import django
import wagtail

from qa.foreign.wagtail_tasks import *  # noqa: F403


def test_the_installed_wagtail_is_version_7():
    assert wagtail.VERSION[0] == 7
    assert django.VERSION[:2] == (5, 2)
