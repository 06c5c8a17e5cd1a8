"""A log handler raises for each record of each logger."""

from tests.settings import *  # noqa: F403

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"raising": {"class": "tests.sample.raising_log.Raising"}},
    "root": {"handlers": ["raising"], "level": "INFO"},
    "loggers": {"django_pglock": {"level": "DEBUG"}},
}
