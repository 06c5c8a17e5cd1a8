"""The answer to a busy lock: a page for people, a problem detail for programs, text for everything else."""

from __future__ import annotations

import json

import pytest
from django.test import RequestFactory, override_settings
from django.utils.translation import override

from django_pglock.errors import LockNotAvailable
from django_pglock.locks.responses import busy_response

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
TEXT = "This is being done already. Please wait a moment before you try again."


def answer_to(accept, status=409):
    headers = {} if accept is None else {"Accept": accept}
    request = RequestFactory().post("/", headers=headers)
    return busy_response(LockNotAvailable("secret", key=1, timeout=0), request, status=status, retry_after=3)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (BROWSER, "text/html; charset=utf-8"),
        ("application/json", "application/problem+json"),
        ("application/problem+json", "application/problem+json"),
        ("application/json, text/plain, */*", "application/problem+json"),
        ("application/json;q=0.5, text/html", "text/html; charset=utf-8"),
        ("*/*", "text/plain; charset=utf-8"),
        ("image/png", "text/plain; charset=utf-8"),
        (None, "text/plain; charset=utf-8"),
    ],
)
def test_the_client_gets_what_it_prefers(accept, content_type):
    response = answer_to(accept)
    assert (response["Content-Type"], response.status_code) == (content_type, 409)
    assert (response["Retry-After"], response["Vary"]) == ("3", "Accept")
    assert TEXT.encode() in response.content
    assert b"secret" not in response.content, "the name may contain a user's id"


@pytest.mark.parametrize(
    ("accept", "content_type"), [("*/*", "application/problem+json"), (BROWSER, "text/html; charset=utf-8")]
)
def test_a_client_that_has_sent_json_gets_a_problem_detail_unless_it_prefers_a_page(accept, content_type):
    request = RequestFactory().post("/", {"a": 1}, content_type="application/json", headers={"Accept": accept})
    response = busy_response(LockNotAvailable("secret", key=1, timeout=0), request, status=409, retry_after=3)
    assert response["Content-Type"] == content_type


def test_the_problem_detail_says_the_status():
    detail = json.loads(answer_to("application/json", status=503).content)
    assert detail == {"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": TEXT}


def templates(**pages):
    loaders = [("django.template.loaders.locmem.Loader", pages)]
    engine = {"BACKEND": "django.template.backends.django.DjangoTemplates", "OPTIONS": {"loaders": loaders}}
    return override_settings(TEMPLATES=[engine])


def test_the_page_is_the_projects_own_template_of_the_status():
    with templates(**{"409.html": "Wait {{ retry_after }} s: {{ message }}"}):
        assert answer_to(BROWSER).content.decode() == f"Wait 3 s: {TEXT}"
        assert b"<h1>Locked</h1>" in answer_to(BROWSER, status=423).content


@override_settings(TEMPLATES=[])
def test_a_project_without_templates_has_a_plain_page():
    with override("ar"):
        page = answer_to(BROWSER).content.decode()
    assert '<html lang="ar" dir="rtl">' in page
    assert "<h1>Conflict</h1>" in page
    assert "<style" not in page
