"""A mail backend with its task function beside it, as third-party apps have them. No module of the app imports it."""

from __future__ import annotations

from django.core.mail.backends.base import BaseEmailBackend

from django_pglock import task
from tests.sample.models import Effect

# Tests count this log record to know how often the module was imported.
imports = globals().get("imports", 0) + 1


@task
def deliver(subject):
    Effect.objects.create(name=f"delivered {subject}")


class TaskBackend(BaseEmailBackend):
    """Has each message delivered by a worker."""

    def send_messages(self, email_messages):
        for message in email_messages:
            deliver.enqueue(message.subject)
        return len(email_messages)


def not_decorated(name):
    Effect.objects.create(name=f"ran {name}")
