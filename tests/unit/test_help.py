"""Every command of the package and of the example project prints its help."""

from __future__ import annotations

import pytest
from django.core.management import get_commands, load_command_class

OURS = sorted(
    (app, name) for name, app in get_commands().items() if app.startswith(("django_pglock", "example_project"))
)


@pytest.mark.parametrize(("app", "name"), OURS)
def test_help_is_printed(app, name, capsys):
    with pytest.raises(SystemExit) as ended:
        load_command_class(app, name).create_parser("manage.py", name).parse_args(["--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5
