"""The names of queues, and which worker serves which queue."""

from __future__ import annotations

import pytest

from django_pglock.tasks.queues import LONGEST_QUEUE, OWN_QUEUE, check_queue_name, check_text, covers, is_served


def test_a_name_has_as_many_characters_as_the_column_takes():
    for name in ("q", "q" * LONGEST_QUEUE):
        check_queue_name(name)
    for name, length in (("", "0"), ("q" * (LONGEST_QUEUE + 1), "129"), ("q" * 2000, "2,000")):
        with pytest.raises(ValueError, match="must have 1 to 128 characters") as error:
            check_queue_name(name)
        assert str(error.value).endswith(f"not {length}: {name[:40]!r}.")


@pytest.mark.parametrize("bad", ["\x00", chr(0xD800), chr(0xDFFF)])
def test_a_text_that_postgresql_does_not_store_is_refused(bad):
    for check in (check_queue_name, lambda text: check_text(text, "A queue's name")):
        with pytest.raises(ValueError, match="A queue's name contains a NUL character or a lone surrogate") as error:
            check(f"mail{bad}" + "x" * 60)
        assert str(error.value).endswith(f"cannot store: {(f'mail{bad}' + 'x' * 35)!r}.")
    check_text("\ud7ff\ue000 é", "A text")


def test_a_pattern_covers_names_and_longer_prefixes():
    names = ["mai", "mail", "mail-bulk", "mail*", "ma*", "*"]
    assert [name for name in names if covers("mail*", name)] == ["mail", "mail-bulk", "mail*"]
    assert [name for name in names if covers("mail", name)] == ["mail"]
    assert [name for name in names if covers("*", name)] == names


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ([], ["default", "mail", "mail-bulk"]),
        (["mail"], ["mail"]),
        (["mail*=3"], ["mail", "mail-bulk"]),
        (["default", "mail-bulk=2"], ["default", "mail-bulk"]),
        (["--exclude mail"], ["default", "mail-bulk"]),
        (["mail*", "--exclude mail-*"], ["mail"]),
        (["--mail"], []),
    ],
)
def test_the_queues_on_the_command_line_say_what_a_worker_serves(asked, served):
    assert [name for name in ("default", "mail", "mail-bulk") if is_served(name, asked)] == served
    assert is_served(OWN_QUEUE, asked)
