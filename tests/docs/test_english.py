"""The checker of the English finds a phrase wherever people read it, and no code. CI runs it on the project itself."""

from __future__ import annotations

import importlib

import pytest

from tests.conftest import ROOT

#: Each has one phrase to rewrite, in its second line.
PLANTED = {
    "a page": ("page.md", "# Tasks\nThe worker goes on with its work.\n"),
    "a table": ("page.md", "| when | what |\n| a worker dies | whoever comes next runs its tasks |\n"),
    "emphasis": ("page.md", "# Tasks\nThe worker **goes** on, as _ever_.\n"),
    "a comment in a code block": ("page.md", "```python\nnumber = 5  # whoever asks\n```\n"),
    "a comment in SQL": ("page.md", "```sql\nSELECT 1 -- whoever asks\n```\n"),
    "proselint's own phrase": ("page.md", "# Tasks\nThe task waits for ever.\n"),
    "a message": ("module.py", 'raise ValueError(\n    "The queue is left alone."\n)\n'),
    "a docstring": ("module.py", 'class Worker:\n    """Whoever runs tasks."""\n'),
    "a comment": ("module.py", "number = 5\nnumber += 1  # whoever asks\n"),
}


@pytest.fixture(scope="module")
def english():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs" / "_ext"))
        return importlib.import_module("english")


@pytest.mark.parametrize(("name", "text"), PLANTED.values(), ids=PLANTED)
def test_a_planted_phrase_is_found_in_its_line(name, text, english, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(text)
    assert english.main([path]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path}:2: ")
