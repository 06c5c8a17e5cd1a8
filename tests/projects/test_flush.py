"""A captured TRUNCATE in a project's tests: Django's flush is one, and the docs have the remedy."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.acceptance

SETTINGS = 'INSTALLED_APPS = ["django_pglock", "pgtrigger", "shop"]\n'
MODELS = """
from django.db import models

from django_pglock import task
from django_pglock.contrib.capture import Capture


@task
def note(operation="", ids=()): ...


class Product(models.Model):
    name = models.CharField(max_length=9)
    capture = Capture(note, on=["truncate"])
"""
#: A test before the flush, and one after it, which says what it finds.
TESTS = """
{snippet}

class Plain(TransactionTestCase):
    def test_a(self):
        pass

    def test_b(self):
        print("without:", [each.kwargs for each in Task.objects.all()])


class Remedied(CaptureTest):
    def test_c(self):
        print("with:", Task.objects.count())
"""


def test_a_flush_leaves_a_task_unless_a_test_deletes_it_as_the_docs_say(project):
    page = (ROOT / "docs" / "howto" / "testing.md").read_text()
    [snippet] = [each for each in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "CaptureTest" in each]
    tests = TESTS.format(snippet=snippet)
    made = project(settings=SETTINGS, shop__models=MODELS, shop__tests=tests)
    made.manage("makemigrations", "shop", "-v0")
    out = made.manage("test", "--noinput")
    assert "without: [{'ids': [], 'operation': 'truncate'}]" in out
    assert "with: 0" in out
