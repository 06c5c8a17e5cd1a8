"""The translations in ``django_pglock/locale`` are complete, fit their messages, and are compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path

import pytest
from babel.messages import Catalog, Message
from babel.messages.extract import extract
from babel.messages.mofile import read_mo
from babel.messages.pofile import read_po
from django.utils.translation import gettext, override
from django.utils.translation.template import templatize

import django_pglock

PACKAGE = Path(django_pglock.__file__).parent
LANGUAGES = ("de", "es", "fr")
KEYWORDS = {
    **dict.fromkeys(("_", "gettext", "gettext_lazy", "gettext_noop")),
    **dict.fromkeys(("ngettext", "ngettext_lazy"), (1, 2)),
    **dict.fromkeys(("pgettext", "pgettext_lazy"), ((1, "c"), 2)),
}
PLACEHOLDER = re.compile(r"%(?:\(\w+\))?[-+#0-9.]*[a-zA-Z%]|\{\w*\}")


@pytest.fixture(params=LANGUAGES)
def folder(request) -> Path:
    return PACKAGE / "locale" / request.param / "LC_MESSAGES"


def catalog_of(file: Path) -> Catalog:
    with file.open("rb") as opened:
        return read_po(opened, locale=file.parent.parent.name)


def sources() -> Iterator[bytes]:
    for file in PACKAGE.rglob("*.py"):
        if "migrations" not in file.parts:
            yield file.read_bytes()
    for file in PACKAGE.rglob("*.html"):
        yield templatize(file.read_text(), origin=str(file)).encode()


@cache
def messages_in_the_package() -> set[object]:
    return {
        found[1] if isinstance(found[1], str) else tuple(filter(None, found[1]))
        for source in sources()
        for found in extract("python", BytesIO(source), keywords=KEYWORDS)
    }


def texts(message: Message) -> list[str]:
    return [message.string] if isinstance(message.string, str) else list(message.string)


def first(message: Message) -> str:
    """Return the message in its singular form."""
    return message.id if isinstance(message.id, str) else message.id[0]


def messages(folder: Path) -> list[Message]:
    return [message for message in catalog_of(folder / "django.po") if message.id]


def test_every_message_is_translated_and_no_other(folder):
    """``cd django_pglock; python -m django makemessages --all`` finds new messages."""
    assert {message.id for message in messages(folder)} == messages_in_the_package()
    assert not [message.id for message in messages(folder) if message.fuzzy or not all(texts(message))]


def test_every_translation_has_the_placeholders_of_its_message(folder):
    for message in messages(folder):
        ids = [message.id] if isinstance(message.id, str) else list(message.id)
        expected = {frozenset(PLACEHOLDER.findall(text)) for text in ids}
        assert {frozenset(PLACEHOLDER.findall(text)) for text in texts(message)} <= expected, message.id


def test_plural_forms_are_complete(folder):
    catalog = catalog_of(folder / "django.po")
    for message in messages(folder):
        assert len(texts(message)) == (catalog.num_plurals if message.pluralizable else 1), message.id


def test_the_compiled_files_are_those_of_the_texts(folder):
    """``cd django_pglock; python -m django compilemessages`` writes them."""
    with (folder / "django.mo").open("rb") as file:
        compiled = {first(message): texts(message) for message in read_mo(file) if message.id}
    assert compiled == {first(message): texts(message) for message in messages(folder)}


def test_a_reader_gets_the_language_of_the_request():
    seen = set()
    for language in ("en", *LANGUAGES):
        with override(language):
            seen.add(gettext("No lease is held."))
    assert len(seen) == len(LANGUAGES) + 1
