"""The settings: a wrong one is named, with what was probably meant."""

from __future__ import annotations

import pytest
from django.core.checks import run_checks
from django.test import override_settings

from django_pglock import checks
from django_pglock.errors import ConfigurationError
from django_pglock.tasks.compat import task_backends


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"SCOPES": "auto"}, "Did you mean 'SCOPE'"),
        ({"XYZ": 1}, "Its options are USING"),
        ({"SCOPE": "forever"}, "must be one of auto, session, transaction"),
        ({"POLL_INTERVAL": 0}, "number of seconds above zero"),
        ({"HEARTBEAT_LIMIT": 60}, "Did you mean 'HEARTBEAT_INTERVAL'"),
        ({"MAX_RESCUES": -1}, "MAX_RESCUES"),
        ({"USING": None}, "['USING'] is None; it must be a string"),
        ({"NAMESPACE": 5}, "['NAMESPACE'] is 5; it must be a string"),
        ({"KEY_FUNCTION": "nope"}, "['KEY_FUNCTION'] is 'nope', which cannot be imported"),
        ({"KEY_FUNCTION": "os.sep"}, "['KEY_FUNCTION'] is 'os.sep', which is not a function"),
        ({"KEY_FUNCTION": len}, "it must be a string"),
        ({"REDACT": "os.sep"}, "['REDACT'] is 'os.sep', which is not a function"),
        ([], "must be a dict"),
    ],
)
def test_a_wrong_setting_is_named_with_the_probable_setting(given, text):
    with override_settings(DJANGO_PGLOCK=given):
        [problem] = checks.check_settings()
    assert problem.id == "django_pglock.E001"
    assert text in problem.msg


@pytest.mark.parametrize(
    ("name", "most"), [("SLOW_LOCK", "2,147,483"), ("HEARTBEAT_INTERVAL", "214,748"), ("POLL_INTERVAL", "2,147,483")]
)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e12, 10**400])
def test_seconds_that_no_timeout_of_postgresql_holds_are_refused(name, most, value):
    """Ten times a heartbeat's interval is a timeout, too."""
    with override_settings(DJANGO_PGLOCK={name: value}):
        [problem] = checks.check_settings()
    assert f"DJANGO_PGLOCK[{name!r}]" in problem.msg
    assert f"up to {most}." in problem.msg


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"databse": "tasks"}, r"has no option 'databse'\. Did you mean 'database'"),
        ({"xyz": 1}, r"has no option 'xyz'\. Its options are database"),
        ({"database": None}, r"\['database'\] is None; it must be a string"),
        ({"database": 5}, r"\['database'\] is 5; it must be a string"),
        (None, "must be a dict, not NoneType"),
    ],
)
def test_invalid_options_of_a_task_backend_are_reported_by_check_and_by_the_backend(options, text):
    backend = {"BACKEND": "django_pglock.backend.PostgresBackend", "OPTIONS": options}
    with override_settings(TASKS={"default": backend}):
        for ask in (run_checks, lambda: task_backends["default"]):
            with pytest.raises(ConfigurationError, match=rf"TASKS\['default'\]\['OPTIONS'\].*{text}"):
                ask()
        assert checks.check_databases() == checks.check_task_databases() == []


def test_a_check_reports_all_misspelled_settings_at_once():
    with override_settings(DJANGO_PGLOCK={"SCOPES": "auto", "USIN": "default", "SCOPE": "auto"}):
        [problem] = checks.check_settings()
    assert problem.msg == (
        "DJANGO_PGLOCK has no option 'SCOPES'. Did you mean 'SCOPE'? "
        "DJANGO_PGLOCK has no option 'USIN'. Did you mean 'USING'?"
    )
