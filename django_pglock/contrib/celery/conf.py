"""The settings of Celery that have a meaning here, such as ``CELERY_TASK_ALWAYS_EAGER``, and ``app.conf``."""

from __future__ import annotations

from typing import Any

from django.conf import settings

from django_pglock.errors import ConfigurationError

DEFAULTS = {"task_default_queue": "default"}
#: Settings that would change what happens to tasks, and what to write instead.
REFUSED = {
    "task_annotations": "the options at the decorators",
    "task_default_rate_limit": "rate_limit= at the decorators",
    "task_routes": "queue= at the decorators",
    "task_queues": "QUEUES in TASKS, and the queues of runlockworker",
}
SERIALIZERS = ("task_serializer", "result_serializer")


class Conf:
    """What ``app.conf`` is, for all apps: the values that were set, then those of Django's settings, then defaults."""

    #: The prefix of the names in Django's settings.
    namespace = "CELERY"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(settings, f"{self.namespace}_{name.upper()}", DEFAULTS.get(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if why := refused(name, value):
            raise ConfigurationError(why)
        object.__setattr__(self, name, value)

    def update(self, *values: Any, **more: Any) -> None:
        """Set several values."""
        for name, value in dict(*values, **more).items():
            setattr(self, name.lower(), value)


def refused(name: str, value: Any) -> str | None:
    """Return why a setting of Celery with this value cannot be carried; None: it can, or changes nothing here."""
    if name in SERIALIZERS and value not in (None, "json"):
        return f"{name} is {value!r}. Arguments and results are JSON here, as json of Celery writes it. Remove it."
    if name in REFUSED and value:
        return f"{name} of Celery is not read. Write {REFUSED[name]}."
    return None


conf = Conf()
