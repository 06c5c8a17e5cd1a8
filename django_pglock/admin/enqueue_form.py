"""The form that enqueues a task: one field for each parameter of the function, checked as ``enqueue()`` checks."""

from __future__ import annotations

import inspect
import json
from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from django_pglock.tasks.call_keys import call_signature, is_grouped
from django_pglock.tasks.fields import TaskFields
from django_pglock.tasks.redaction import NOT_SHOWN, REDACTED

_Parameter = inspect.Parameter
_POSITIONAL = (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)
#: The field for the annotation of a parameter, as a class or as text. All other values are typed as JSON.
_FIELDS: dict[str, type[forms.Field]] = {"int": forms.IntegerField, "float": forms.FloatField}
#: The parameters of the form for a function with ``group=``: its own parameters are not those of a call.
_GROUPED = inspect.Signature([_Parameter("arguments", _Parameter.VAR_KEYWORD)])


class _Decoder(json.JSONDecoder):
    """Refuses JSON that Python cannot read, or that no page can show, in the same way as other invalid JSON."""

    def decode(self, s: str, *arguments: Any) -> Any:
        try:
            value = super().decode(s, *arguments)
            # JSON can contain a lone surrogate. A page cannot, because UTF-8 does not have it.
            json.dumps(value, ensure_ascii=False).encode()
        except json.JSONDecodeError:
            raise
        except (RecursionError, ValueError) as error:
            raise json.JSONDecodeError(str(error), s, 0) from None
        return value


class EnqueueForm(forms.Form):
    """The arguments of one call. ``stored`` are those of an earlier call, of which hidden ones stay hidden."""

    #: Fields may be named like attributes of the form.
    PREFIX = "argument"

    def __init__(self, task: TaskFields, data: Any = None, *, shown: Any = None, stored: Any = None) -> None:
        self.parameters = parameters_of(task)
        # Django would copy ``initial`` into fields that it shows again; hidden values must never be in the page.
        self._stored = {name: value for name, value in (stored or {}).items() if _is_hidden((shown or {}).get(name))}
        visible = {name: value for name, value in (shown or {}).items() if name not in self._stored}
        super().__init__(data, prefix=self.PREFIX, initial={name: _typed(value) for name, value in visible.items()})
        for parameter in self.parameters:
            self.fields[parameter.name] = self._field_of(parameter)

    def _field_of(self, parameter: _Parameter) -> forms.Field:
        name = parameter.name
        is_required = parameter.default is _Parameter.empty and parameter.kind not in (
            _Parameter.VAR_POSITIONAL,
            _Parameter.VAR_KEYWORD,
        )
        options: dict[str, Any] = {"label": name, "required": is_required and name not in self._stored}
        annotation = _annotation(parameter)
        if name in self._stored:
            options["help_text"] = _("Hidden. Leave empty to use the value of the earlier task.")
        elif parameter.default is not _Parameter.empty:
            options["help_text"] = _("Default: %(value)s") % {"value": _as_text(parameter.default)}
        if annotation in _FIELDS:
            return _FIELDS[annotation](**options)
        if annotation == "str":
            return forms.CharField(strip=False, empty_value=None, **options)
        if "help_text" not in options:
            options["help_text"] = _as_json_help(parameter)
        return forms.JSONField(decoder=_Decoder, widget=forms.Textarea(attrs={"rows": 2, "cols": 60}), **options)

    def clean(self) -> dict[str, Any]:
        """Refuse a list of positional arguments that is no list, and keyword arguments that are no object."""
        for parameter in self.parameters:
            value = self.cleaned_data.get(parameter.name)
            if value is not None and parameter.kind is _Parameter.VAR_POSITIONAL and not isinstance(value, list):
                self.add_error(parameter.name, _("Give a JSON list, such as [1, 2]."))
            if value is not None and parameter.kind is _Parameter.VAR_KEYWORD and not isinstance(value, dict):
                self.add_error(parameter.name, _('Give a JSON object, such as {"name": 1}.'))
            elif value is not None and parameter.kind is _Parameter.VAR_KEYWORD and value.keys() & self.fields.keys():
                self.add_error(parameter.name, _("Give each argument in its own field."))
        return self.cleaned_data

    def call(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the keyword arguments. An empty field has its default or its stored value."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        values = self._values()
        has_more = any(each.kind is _Parameter.VAR_POSITIONAL and each.name in values for each in self.parameters)
        for parameter in self.parameters:
            name, kind = parameter.name, parameter.kind
            if name not in values:
                # Positional arguments follow, so this one cannot be left out.
                if has_more and kind in _POSITIONAL:
                    args.append(parameter.default)
            elif kind is _Parameter.VAR_POSITIONAL:
                args += values[name]
            elif kind is _Parameter.VAR_KEYWORD:
                kwargs |= values[name]
            elif kind is _Parameter.POSITIONAL_ONLY or (has_more and kind in _POSITIONAL):
                args.append(values[name])
            else:
                kwargs[name] = values[name]
        return args, kwargs

    def _values(self) -> dict[str, Any]:
        """Return the arguments that were typed, or are stored. ``null`` is typed as JSON."""
        values: dict[str, Any] = {}
        for name in (each.name for each in self.parameters):
            typed = self.data.get(self.add_prefix(name), "")
            if typed != "":
                values[name] = self.cleaned_data[name]
            elif name in self._stored:
                values[name] = self._stored[name]
        return values


def parameters_of(task: TaskFields) -> list[_Parameter]:
    """Return the parameters of a call, without the context."""
    if is_grouped(task):
        return list(_GROUPED.parameters.values())
    return list(call_signature(task.func, task.takes_context).parameters.values())


def by_parameter(task: TaskFields, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a row by the parameters that take them, if the function still takes them."""
    signature = inspect.Signature(parameters_of(task))
    if not isinstance(args, list):
        # A sentence instead of a value that cannot be read.
        return {}
    try:
        return dict(signature.bind_partial(*args, **kwargs).arguments)
    except TypeError:
        return {}


def _annotation(parameter: _Parameter) -> str:
    annotation = parameter.annotation
    if parameter.kind in (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD):
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


def _is_hidden(shown: Any) -> bool:
    """Return whether a value, or a part of it, is hidden or not shown. The text instead of it must not be enqueued."""
    if isinstance(shown, dict):
        return any(map(_is_hidden, shown.values()))
    return any(map(_is_hidden, shown)) if isinstance(shown, (list, tuple)) else shown in (REDACTED, NOT_SHOWN)


def _typed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _as_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return repr(value)


def _as_json_help(parameter: _Parameter) -> Any:
    if parameter.kind is _Parameter.VAR_POSITIONAL:
        return _("A JSON list of further arguments, such as [1, 2].")
    if parameter.kind is _Parameter.VAR_KEYWORD:
        return _('A JSON object of keyword arguments, such as {"name": 1}.')
    return _('JSON, such as 7, true, [1, 2] or "text".')
