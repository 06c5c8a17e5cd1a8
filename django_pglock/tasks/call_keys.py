"""One call: whether its function accepts the arguments, and its keys, which are templates filled in with them."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from django.conf import settings
from django.utils.crypto import salted_hmac

from django_pglock.errors import TaskArgumentsError
from django_pglock.keys.template import KeyTemplate
from django_pglock.tasks.arguments import to_json

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields


#: The width of the column. A key of more than ``LONGEST_KEY - 100`` characters is shortened to ``LONGEST_KEY``
#: characters, and ends in its digest.
LONGEST_KEY = 512
#: Up to this number of characters, the text of the arguments is itself the unique key. For longer arguments, the key
#: has their digest. Texts are better for the index: they are mostly in the order of the calls, and digests are not. A
#: digest has 64 characters.
LONGEST_ARGUMENTS = 100
#: The prefixes of the lock keys of a group and of a rate without ``lock=``. A key from a template cannot begin with a
#: percent sign.
GROUPED, RATED = "%group ", "%rate "

_DIGEST = re.compile("[0-9a-f]{64}$")


class CallKeys(NamedTuple):
    """The keys of one call. None: the task does not have this key."""

    lock: str | None = None
    group: str | None = None
    fair: str | None = None
    unique: str | None = None


NO_KEYS = CallKeys()


def key_maker(task: TaskFields) -> Callable[[tuple[Any, ...], Mapping[str, Any], str | None], CallKeys]:
    """Return a function that does the same as ``keys_of``, for the calls of one task.

    Its last argument is the JSON text of ``args``, if it was made before. A unique key often consists of it.
    Values that are the same for all calls are computed once. Otherwise this would take a tenth of the time in which a
    hundred thousand calls are enqueued.
    """
    if not task.has_keys:
        return lambda args, kwargs, args_text: NO_KEYS
    names = None if task.takes_context or task.group is not None else _names(task.func)
    count = -1 if names is None else len(names)
    # With no key but that of unique=True, the arguments need no names.
    has_one_key = task.unique is not None and task.rate is None and not task.kept["templates"]
    # If no value is redacted, the text of the arguments, up to this length, is itself the unique key.
    start, longest = f"{task.module_path} ", -1 if task.redact else LONGEST_ARGUMENTS

    def keys(args: tuple[Any, ...], kwargs: Mapping[str, Any], args_text: str | None) -> CallKeys:
        # If the call has exactly the positional arguments of the function, their text is the same that ``_text_of``
        # would return. Not if there is a dict, because its keys may be in any order.
        is_all = args_text is not None and len(args) == count and not kwargs and "{" not in args_text
        text = args_text if is_all else None
        if text is not None and has_one_key:
            unique = start + (text if len(text) <= longest else _of_arguments(task, text))
            return CallKeys(None, None, None, _shortened(task, unique))
        return keys_of(task, args, kwargs, text)

    return keys


def keys_of(task: TaskFields, args: tuple[Any, ...], kwargs: Mapping[str, Any], text: str | None = None) -> CallKeys:
    """Return the keys of a call. Raises ``TaskArgumentsError`` for arguments that the function does not accept.

    ``text`` is that of all arguments, for ``unique=True``, if it is known.
    """
    values = _bound(task, args, kwargs)

    def render(template: str | None) -> str | None:
        return None if template is None else task.kept["templates"][template].render(values)

    group, lock, unique = render(task.group.key) if task.group else None, render(task.lock), None
    if lock is None and group is not None:
        lock = f"{GROUPED}{task.module_path} {group}"
    elif lock is None and task.rate is not None:
        lock = f"{RATED}{render(task.rate.key) or task.module_path}"
    if task.unique is not None:
        own = render(task.unique.key) or _of_arguments(task, text or _text_of(task, values))
        unique = f"{task.module_path} {own}"
    if task.advisory and lock is not None and _shortened(task, lock) != lock:
        raise TaskArgumentsError(
            f"The lock key of {task.module_path} has {len(lock)} characters. With advisory=True it may have "
            f"{LONGEST_KEY - 100} at most."
        )
    return CallKeys(*(_shortened(task, key) for key in (lock, group, render(task.fair), unique)))


def _of_arguments(task: TaskFields, text: str) -> str:
    """Return the unique key of all arguments, for ``unique=True``. A task with ``redact`` has only digests."""
    return _digest(task, text) if len(text) > LONGEST_ARGUMENTS or task.redact else text


def _digest(task: TaskFields, text: str) -> str:
    """Return a keyed digest of 64 characters, so that redacted arguments cannot be found by trying all values.

    The secret is the oldest one of the settings. So processes with a new SECRET_KEY, and the old one in
    SECRET_KEY_FALLBACKS, compute the same digests as processes with only the old one.
    """
    if not task.redact:
        return hashlib.sha256(text.encode()).hexdigest()
    secret = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS][-1]
    return salted_hmac(__name__, text, secret=secret, algorithm="sha256").hexdigest()


def _text_of(task: TaskFields, values: Mapping[str, Any]) -> str:
    """Return one text for all calls with the same arguments, by position or by name.

    If all parameters of the function can be positional, it is the list of their values in order.
    """
    is_list = task.group is None and _names(task.func) is not None
    arguments = list(values.values()) if is_list else [values]
    return to_json(arguments, what=f"The arguments of {task.module_path}", sort_keys=True)


def make_templates(task: TaskFields, where: str) -> None:
    """Keep the templates of a task. Raises ``LockKeyError`` for unknown fields and for ambiguous keys."""
    parameters = call_signature(task.func).parameters.values()
    takes_any = task.group is not None or any(each.kind is each.VAR_KEYWORD for each in parameters)
    known = None if takes_any else [each.name for each in parameters]
    task.kept["templates"] = {
        text: KeyTemplate(text, known=known, where=where, is_own=text != task.lock) for text in templates_of(task)
    }


def templates_of(task: TaskFields) -> list[str]:
    """Return the templates of all keys of a task."""
    keyed = [each for each in (task.group, task.rate, task.unique) if each is not None]
    return [text for text in (task.lock, task.fair, *(each.key for each in keyed)) if text is not None]


def names_in_keys(task: TaskFields) -> set[str]:
    """Return the names of the parameters, and of their attributes, whose values are part of keys of a task."""
    return set().union(*(template.names for template in task.kept["templates"].values()))


def positional_names(task: TaskFields, count: int) -> list[str]:
    """Return the names of the parameters for ``count`` positional arguments, or their numbers if there are none."""
    parameters = call_signature(task.func, task.takes_context).parameters.values()
    names = [each.name for each in parameters if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    return (names + names[-1:] * count)[:count] if names else [str(number) for number in range(count)]


def has_digest(key: str) -> bool:
    """Return whether a key may end in a digest: of all arguments of the call, or of a key that was too long."""
    return _DIGEST.search(key) is not None


@lru_cache(maxsize=1024)
def call_signature(function: Callable[..., Any], takes_context: bool = False) -> inspect.Signature:
    """Return the parameters of a call: those of the function without the context, which the worker adds."""
    signature = inspect.signature(function)
    has_context = takes_context and not adds_context(function)
    return signature.replace(parameters=[*signature.parameters.values()][has_context:])


def adds_context(function: Callable[..., Any]) -> bool:
    """Return whether a decorator of the project takes the context, and not the function that it has wrapped."""
    signatures = (inspect.signature(function, follow_wrapped=each) for each in (True, False))
    inner, outer = (next(iter(each.parameters), "") for each in signatures)
    return outer == "context" != inner


@lru_cache(maxsize=1024)
def _names(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of the parameters if all are positional. Binding a call takes ten times as long as ``zip``."""
    parameters = call_signature(function).parameters.values()
    are_plain = all(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    return tuple(each.name for each in parameters) if are_plain else None


def _bound(task: TaskFields, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments by name, those of ``**more`` among them."""
    if task.group is not None:
        if args:
            raise TaskArgumentsError(f"{task.module_path} has a group, so its calls take only keyword arguments.")
        return kwargs
    names = None if kwargs or task.takes_context else _names(task.func)
    if names is not None and len(args) == len(names):
        return dict(zip(names, args, strict=True))
    try:
        bound = call_signature(task.func, task.takes_context).bind(*args, **kwargs)
    except TypeError as error:
        raise TaskArgumentsError(f"{task.module_path} cannot be called like this: {error}.") from error
    bound.apply_defaults()
    values = bound.arguments
    parameters = call_signature(task.func).parameters.items()
    more: Mapping[str, Any] = next((values.pop(name) for name, each in parameters if each.kind is each.VAR_KEYWORD), {})
    return {**more, **values}


def _shortened(task: TaskFields, key: str | None) -> str | None:
    """Return a key that fits into its column.

    A shortened key is longer than each key that is not shortened. So no value can result in the shortened key of
    another.
    """
    if key is None or len(key) <= LONGEST_KEY - 100:
        return key
    return f"{key[: LONGEST_KEY - 65]}…{_digest(task, key)}"


def check_call(task: TaskFields, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ``TaskArgumentsError``, a ``TypeError``, for a call that Python would refuse.

    The calls of a function with ``group=`` are dicts in a list, so their names are not those of its parameters.
    """
    if task.group is None and (why := misfit(task.func, task.takes_context, len(args), *kwargs)):
        raise TaskArgumentsError(f"{task.module_path}() {why}")


# Cached, because the answer depends only on names and numbers, and to bind a call takes ten times as long.
@lru_cache(maxsize=4096)
def misfit(function: Callable[..., Any], takes_context: bool, count: int, *names: str) -> str | None:
    """Return why a function does not accept ``count`` positional arguments and these names; None: it does."""
    try:
        # Not the function that a decorator has wrapped: the decorator may add arguments of its own.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # some functions written in C have none
        return None
    try:
        signature.bind(*[None] * (takes_context + count), **dict.fromkeys(names))
    except TypeError as error:
        # The end of a sentence that begins with the function.
        got = "got " if str(error).startswith(("too many", "multiple")) else ""
        return f"{got}{error}. It takes {_shown(signature, takes_context)}."
    return None


def _shown(signature: inspect.Signature, takes_context: bool) -> str:
    """Return the parameters of a call, without annotations and without the context, which the worker adds."""
    parameters = list(signature.parameters.values())[takes_context:]
    plain = [each.replace(annotation=each.empty) for each in parameters]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))
