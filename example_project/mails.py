"""A mail backend that sends each mail by a task, as the page about tasks shows it."""

import django
from django.core import mail
from django.core.mail.backends.base import BaseEmailBackend

from django_pglock import Exponential, enqueue_many, task

FIELDS = ("subject", "body", "from_email", "to", "cc", "bcc", "reply_to")


def smtp():
    if django.VERSION >= (6, 1):
        return mail.mailers["smtp"]
    return mail.get_connection("django.core.mail.backends.smtp.EmailBackend")


@task(
    queue_name="mail",
    max_attempts=10,
    retry_on=(OSError,),
    backoff=Exponential(base=60, cap=6 * 3600),
    redact=("fields", "alternatives"),  # the link in the mail is a secret
)
def deliver(fields, headers, alternatives):
    message = mail.EmailMultiAlternatives(**fields, headers=headers)
    for content, mimetype in alternatives:
        message.attach_alternative(content, mimetype)
    smtp().send_messages([message])


def arguments_of(message):
    if message.attachments:
        raise ValueError("Arguments of tasks are JSON. Store attachments, and send them by a task of their own.")
    fields = {name: getattr(message, name) for name in FIELDS}
    fields["subject"] = str(message.subject)  # it may be a text that is translated later
    return {
        "fields": fields,
        "headers": message.extra_headers,
        "alternatives": [list(each) for each in getattr(message, "alternatives", [])],
    }


class TaskBackend(BaseEmailBackend):
    def send_messages(self, messages):
        return len(enqueue_many(deliver, [arguments_of(each) for each in messages]))
