"""A pytest plugin: the tests get a private PostgreSQL unless ``DATABASE_URL`` names one.

It is loaded with ``-p``, so that the server runs and the variable is set before Django's settings are read. With
pytest-xdist each of its processes has a server of its own: tests end all sessions, or look at all locks.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

_IS_PRIVATE = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Start the server before other plugins run this hook, because pytest-django reads the settings in it."""
    options = early_config.known_args_namespace
    only_distributes = getattr(options, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if "DATABASE_URL" not in os.environ and not (options.help or options.version or only_distributes):
        _start(early_config)
    return (yield)


def pytest_report_header(config: pytest.Config) -> str:
    """Say on which server the tests run."""
    return f"database: {'a private PostgreSQL' if config.stash.get(_IS_PRIVATE, False) else 'DATABASE_URL'}"


def _start(config: pytest.Config) -> None:
    # Imported here: with DATABASE_URL the tests also run on Windows, where the private server does not work.
    from example_project.postgres import NoPostgres, PrivatePostgres

    server = PrivatePostgres()
    config.add_cleanup(server.stop)
    config.add_cleanup(lambda: os.environ.pop("DATABASE_URL", None))
    config.stash[_IS_PRIVATE] = True
    try:
        os.environ["DATABASE_URL"] = server.start().url
    except NoPostgres as error:
        raise pytest.UsageError(str(error)) from error
