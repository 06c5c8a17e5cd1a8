"""The body of the response to a request whose lock is busy: a problem detail (RFC 9457), as JSON."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from django_pglock.locks.views import busy_text

CONTENT_TYPE = "application/problem+json"


def problem(status: int = HTTPStatus.CONFLICT) -> dict[str, Any]:
    """Return the problem detail. It does not contain the name of the lock, which may contain the id of a user."""
    return {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": busy_text()}
