"""A mail backend with its task function beside it, by ``django.tasks`` alone: what a third-party app has."""

from __future__ import annotations

from django.core.mail.backends.base import BaseEmailBackend
from django.tasks import task

from qa.foreign.sample.models import Letter


@task
def deliver(subject: str) -> None:
    Letter.objects.create(text=f"delivered: {subject}")


class TaskBackend(BaseEmailBackend):
    def send_messages(self, email_messages: list[object]) -> int:
        for message in email_messages:
            deliver.enqueue(message.subject)
        return len(email_messages)
