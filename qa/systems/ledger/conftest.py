"""Holders that send requests to two processes of gunicorn."""

from __future__ import annotations

from uuid import uuid4

import pytest

from example_project.systems.ledger.models import Entry
from example_project.systems.web import GUNICORN, Browser


class Holder(Browser):
    """A holder with credits."""

    def __init__(self, port, name):
        self.name = name
        super().__init__(port)

    @property
    def balance(self):
        return Entry.objects.balance_of(self.name)

    def gets(self, amount):
        return Entry.objects.create(holder=self.name, amount=amount, key=str(uuid4()), charge=str(uuid4()))

    def order(self, action, amount, key=None, **headers):
        form = {"amount": amount, "key": key or uuid4()}
        return self.post(f"/systems/ledger/{self.name}/{action}/", form, **headers)

    def refund(self, entry):
        return self.post(f"/systems/ledger/{self.name}/refund/{entry.pk}/")


@pytest.fixture
def holder(site, transactional_db):
    [port] = site.serve(GUNICORN)
    return lambda name: Holder(port, name)
