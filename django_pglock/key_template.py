"""Key templates: ``"order:{order_id}"`` or ``"checkout:{request.user.pk}"``, checked when the decorator is applied.

A field is the name of a parameter, with attributes behind it. Each value becomes an escaped part of the name, so a
value that contains a colon cannot name another lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from string import Formatter
from typing import Any

from django_pglock.errors import LockKeyError
from django_pglock.keys import part_of


class KeyTemplate:
    """A name with fields in braces. ``known`` are the parameters that fields may begin with; None allows any."""

    def __init__(self, text: str, *, known: Collection[str] | None, where: str) -> None:
        self.text = text
        self._where = where
        self._pieces: list[tuple[str, list[str]]] = []
        for literal, path in self._parse():
            self._pieces.append((literal, path))
            if path and known is not None and path[0] not in known:
                raise LockKeyError(
                    f"{where}: the key {text!r} names {path[0]!r}, which is no parameter; there are "
                    f"{', '.join(sorted(known)) or 'none'}."
                )

    def _parse(self) -> list[tuple[str, list[str]]]:
        try:
            parsed = list(Formatter().parse(self.text))
        except ValueError as error:
            raise LockKeyError(f"{self._where}: the key {self.text!r} is no template: {error}.") from error
        pieces: list[tuple[str, list[str]]] = []
        for literal, field, form, conversion in parsed:
            if field is None:
                pieces.append((literal, []))
                continue
            path = field.split(".")
            # Only public attributes: no index, no call, no format, nothing that reaches into an object's inside.
            if form or conversion or not all(step.isidentifier() and not step.startswith("_") for step in path):
                raise LockKeyError(
                    f"{self._where}: {{{field}}} in the key {self.text!r} is not a parameter with attributes behind it."
                )
            pieces.append((literal, path))
        return pieces

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the name for these parameters. Raises ``LockKeyError`` for a value that cannot be part of one."""
        return "".join(literal + (self._part(path, values) if path else "") for literal, path in self._pieces)

    def _part(self, path: list[str], values: Mapping[str, Any]) -> str:
        try:
            value = values[path[0]]
            for step in path[1:]:
                value = getattr(value, step)
            return part_of(value)
        except (KeyError, AttributeError) as error:
            raise LockKeyError(f"{self._where}: {{{'.'.join(path)}}} has no value here ({error}).") from error
        except LockKeyError as error:
            raise LockKeyError(f"{self._where}: {{{'.'.join(path)}}}: {error}") from error
