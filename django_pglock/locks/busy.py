"""The response to a request whose lock is busy: a page, a problem detail or a text, by the client's Accept header."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist, loader
from django.utils.cache import patch_vary_headers
from django.utils.html import format_html
from django.utils.translation import get_language, get_language_bidi
from django.utils.translation import gettext as _

from django_pglock.errors import LockNotAvailable

#: The content type of ``problem``.
PROBLEM_JSON = "application/problem+json"
#: The content types of the response. A client that accepts any type, such as curl and fetch, gets the first one.
TYPES = ("text/plain", "text/html", "application/json", PROBLEM_JSON)
#: The page of a project without its own template. No inline style or script, because a strict CSP forbids them.
PAGE = (
    '<!doctype html>\n<html lang="{}" dir="{}">\n<head><meta charset="utf-8"><title>{}</title></head>\n'
    "<body><h1>{}</h1><p>{}</p></body>\n</html>\n"
)


def busy_response(
    error: LockNotAvailable, request: HttpRequest, *args: Any, status: int, retry_after: int, **kwargs: Any
) -> HttpResponse:
    """Return the response to a busy lock. It does not have the lock's name, which may contain a user's id."""
    preferred = request.get_preferred_type(TYPES)
    response: HttpResponse
    if preferred == "text/html":
        response = HttpResponse(_page(request, status, retry_after), status=status)
    elif preferred in ("application/json", PROBLEM_JSON):
        response = JsonResponse(problem(status), status=status, content_type=PROBLEM_JSON)
    else:
        response = HttpResponse(busy_text(), status=status, content_type="text/plain; charset=utf-8")
    response["Retry-After"] = str(retry_after)
    patch_vary_headers(response, ["Accept"])
    return response


def busy_text() -> str:
    """Return the text for a person whose request met a busy lock."""
    return _("This is being done already. Please wait a moment before you try again.")


def problem(status: int = HTTPStatus.CONFLICT) -> dict[str, Any]:
    """Return a problem detail (RFC 9457)."""
    return {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": busy_text()}


def _page(request: HttpRequest, status: int, retry_after: int) -> str:
    """Render the project's template of this status, ``409.html``, as Django does with ``404.html``."""
    try:
        template = loader.get_template(f"{status}.html")
    except TemplateDoesNotExist:
        title = HTTPStatus(status).phrase
        direction = "rtl" if get_language_bidi() else "ltr"
        return format_html(PAGE, get_language() or "en", direction, title, title, busy_text())
    return template.render({"message": busy_text(), "retry_after": retry_after}, request)
