"""Key templates: ``"order:{order_id}"`` or ``"checkout:{request.user.pk}"``, checked when the decorator is applied.

A field is the name of a parameter, which attributes may follow. Each value becomes an escaped part of the name, without
colons. So if there is a colon before each field, a value cannot change another part: ``"a:b"`` and ``"c"`` do not
result in the same name as ``"a"`` and ``"b:c"``. A template without these colons is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from string import Formatter
from typing import Any

from django_pglock.errors import LockKeyError
from django_pglock.keys import part_of


class KeyTemplate:
    """A name with fields in braces. ``known`` are the parameters that fields may begin with; None allows any.

    ``where`` names the decorator in errors. ``is_own``: the names of this template cannot be confused with other names
    for another reason, so the template may begin with a field. Raises ``LockKeyError`` for an invalid template, and for
    a template in which a value could result in the name of another lock.
    """

    def __init__(self, text: str, *, known: Collection[str] | None, where: str, is_own: bool = False) -> None:
        self.text = text
        self._where = where
        self._is_own = is_own
        self._pieces: list[tuple[str, list[str]]] = []
        for literal, path in self._parse():
            self._pieces.append((literal, path))
            if path and known is not None and path[0] not in known:
                raise self._error(
                    f"the key {text!r} names {path[0]!r}, which is not a parameter. The parameters: "
                    f"{', '.join(sorted(known)) or 'none'}."
                )
        self._refuse_ambiguity()

    @property
    def names(self) -> set[str]:
        """The parameters that the fields begin with, and the attributes behind them."""
        return {name for _, path in self._pieces for name in path}

    def _refuse_ambiguity(self) -> None:
        fields = [(literal, path) for literal, path in self._pieces if path]
        for literal, path in fields[1:] if self._is_own else fields:
            if ":" not in literal:
                field = "{" + ".".join(path) + "}"
                raise self._error(
                    f"the key {self.text!r} has no colon before {field}, so two different keys could become the same "
                    f"name. Write it like 'order:{field}'."
                )

    def _error(self, problem: str) -> LockKeyError:
        return LockKeyError(f"{self._where}: {problem}")

    def _parse(self) -> list[tuple[str, list[str]]]:
        try:
            parsed = list(Formatter().parse(self.text))
        except ValueError as error:
            raise self._error(f"the key {self.text!r} is not a valid template: {error}.") from error
        return [(literal, self._path(field, form, conversion)) for literal, field, form, conversion in parsed]

    def _path(self, field: str | None, form: str | None, conversion: str | None) -> list[str]:
        """Return the steps from a parameter to the value of a field; none for the text behind the last field."""
        if field is None:
            return []
        path = field.split(".")
        # Only public attributes: no index, no call, no private name.
        if form or conversion or not all(step.isidentifier() and not step.startswith("_") for step in path):
            raise self._error(
                f"{{{field}}} in the key {self.text!r} must be a parameter, or attributes of one, without a format."
            )
        return path

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the name for these parameters. Raises ``LockKeyError`` for a value that cannot be part of a name."""
        return "".join(literal + (self._part(path, values) if path else "") for literal, path in self._pieces)

    def _part(self, path: list[str], values: Mapping[str, Any]) -> str:
        try:
            value = values[path[0]]
            for step in path[1:]:
                value = getattr(value, step)
            return part_of(value)
        except (KeyError, AttributeError, LockKeyError) as error:
            raise self._error(f"{{{'.'.join(path)}}} has no value for a key in this call: {error}") from error
