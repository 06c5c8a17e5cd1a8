"""A pytest plugin: the tests get a private PostgreSQL unless ``DATABASE_URL`` names one.

It is loaded with ``-p``, so that the server runs and the variable is set before Django's settings are read.
"""

from __future__ import annotations

import os

from example_project.postgres import PrivatePostgres

_server: PrivatePostgres | None = None

if "DATABASE_URL" not in os.environ:
    _server = PrivatePostgres().start()
    os.environ["DATABASE_URL"] = _server.url


def pytest_report_header() -> str:
    """Say on which server the tests run."""
    return f"database: {'a private PostgreSQL' if _server else 'DATABASE_URL'}"


def pytest_unconfigure() -> None:
    """Stop the private server."""
    if _server is not None:
        _server.stop()
        os.environ.pop("DATABASE_URL", None)
