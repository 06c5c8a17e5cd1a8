"""Task functions as Django's own documentation writes them: nothing here knows our package."""

from __future__ import annotations

import django

if django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task


@task
def add(a, b):
    return a + b


@task(priority=2, queue_name="emails", takes_context=True)
def email_users(context, emails, subject, message):
    return {"attempt": context.attempt, "to": emails, "subject": subject}


@task()
async def fetch(url):
    return url.upper()


@task
def explode():
    raise RuntimeError("boom")
