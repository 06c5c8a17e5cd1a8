"""The comment with the names of locks: whatever they are, the statement behind it is not a part of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from django_pglock.keys import Key
from django_pglock.locks.statements import LONGEST_NAME, MOST_NAMES, comment

#: Names of the characters that may begin or end a comment, or a placeholder, and of some others.
NAMES = st.text(alphabet="/*%-'\n\x00 aé", min_size=1, max_size=2 * LONGEST_NAME)


def outside_of_comments(statement):
    """Return what the server executes. In PostgreSQL comments may be nested."""
    rest, depth, at = "", 0, 0
    while at < len(statement):
        pair = statement[at : at + 2]
        if pair == "/*":
            depth += 1
        elif pair == "*/":
            depth -= 1
            assert depth >= 0
        else:
            rest += "" if depth else statement[at]
            at += 1
            continue
        at += 2
    assert depth == 0, "the comment does not end"
    return rest


@given(st.lists(NAMES, min_size=1, max_size=2 * MOST_NAMES))
def test_no_name_ends_its_comment_or_begins_another_one(names):
    text = comment(tuple(Key(name, number) for number, name in enumerate(names)))
    assert outside_of_comments(f"{text}SELECT 1").strip() == "SELECT 1"
    assert text.count("django_pglock:") == min(len(names), MOST_NAMES)
    assert "%" not in text
    assert text.isprintable()


def test_a_long_name_is_cut_with_a_mark_and_the_longest_is_whole():
    whole, cut = (comment((Key("x" * length, 1),)) for length in (LONGEST_NAME, LONGEST_NAME + 1))
    assert whole.count("x") == LONGEST_NAME
    assert cut.count("x") == LONGEST_NAME - 1
    assert "x… */ " in cut
