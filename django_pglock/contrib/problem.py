"""The answer to a request that came second, for programs: a problem of RFC 9457, as JSON."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from django_pglock.locks.views import busy_text

CONTENT_TYPE = "application/problem+json"


def problem(status: int = HTTPStatus.CONFLICT) -> dict[str, Any]:
    """Return the problem. The lock's name stays inside: it may hold a user's id."""
    return {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": busy_text()}
