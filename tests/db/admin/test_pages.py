"""How the admin prints a count that stopped."""

from __future__ import annotations

import pytest

from django_pglock.admin import pages

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(("grouped", "text"), [(False, "10000+"), (True, "&gt;10,000")])
def test_a_capped_count_is_shown_with_a_plus_sign(settings, grouped, text):
    from django.template import Context, Template

    settings.USE_THOUSAND_SEPARATOR = grouped
    count = pages.AtLeast(10_000)
    assert count == 10_000
    assert Template("{{ count }}").render(Context({"count": count})) == text


@pytest.mark.parametrize(("count", "text"), [(99, "99"), (100, "100"), (101, "100+")])
def test_a_count_above_the_limit_is_capped(count, text):
    assert str(pages.capped(count, 100)) == text
