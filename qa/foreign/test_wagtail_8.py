"""Wagtail 8. See ``wagtail_tasks.py``."""

import django
import wagtail

from qa.foreign.wagtail_tasks import *  # noqa: F403


def test_the_installed_wagtail_is_version_8():
    assert wagtail.VERSION[0] == 8
    assert django.VERSION >= (6, 0)
