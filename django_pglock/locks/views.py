"""``lock_view``: the second of two requests gets a graceful 409 instead of a second charge."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from django_pglock.errors import ConfigurationError, LockNotAvailable
from django_pglock.keys import Key, make_key
from django_pglock.keys.template import KeyTemplate
from django_pglock.locks.async_handle import AsyncHandle
from django_pglock.locks.handle import Handle
from django_pglock.locks.lockable import refuse_generators
from django_pglock.locks.options import Options, Timeout, max_hold_of, scope_of, seconds_of
from django_pglock.locks.responses import ResponseLock

View = TypeVar("View", bound=Callable[..., Any])
#: What a busy lock may be answered with; others would tell the client something else.
STATUSES = (409, 423, 429, 503)
#: What a request's method can be; another name would lock nothing.
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def lock_view(
    key: str,
    *,
    timeout: Timeout = 0,
    status: int = 409,
    retry_after: int = 1,
    methods: Iterable[str] | None = None,
    on_busy: Callable[..., Any] | None = None,
    shared: bool = False,
    scope: str | None = None,
    using: str | None = None,
    max_hold: Timeout = None,
) -> Callable[[View], View]:
    """Run a view, sync or async, function or class, under a lock; answer at once when somebody else is in there.

    - ``key``: a template over ``request`` and the view's parameters: ``"checkout:{request.user.pk}"``. A value that
      is None, such as the primary key of an anonymous user, raises ``LockKeyError``: put the login check outside.
    - ``timeout``: seconds to wait before giving up; default 0, because each waiter occupies a web worker.
    - ``status``: 409 (default), 423, 429 or 503; ``retry_after``: seconds in the header of that answer.
    - ``methods``: lock only these, for example ``["POST"]``; default all. HEAD is locked where GET is.
    - ``on_busy``: a callable ``(exception, request, *args, **kwargs)`` that makes the answer instead.
    - ``shared``, ``scope``, ``using``, ``max_hold`` as for ``lock``.

    A streaming response, or one that is rendered after the view has returned (``TemplateResponse``), keeps a session
    lock until it is closed, or until nobody has it any more.

    Raises ``LockKeyError`` and ``ConfigurationError`` when the decorator is applied, if the template or the view cannot
    work.
    """
    if not isinstance(key, str):
        raise ConfigurationError(f"lock_view was given {key!r} as its key; write @lock_view('order:{{order_id}}').")
    if status not in STATUSES:
        raise ConfigurationError(f"lock_view cannot answer with {status!r}; use one of {STATUSES}.")
    if on_busy is not None and not callable(on_busy):
        raise ConfigurationError(f"lock_view: on_busy is {on_busy!r}; give a function that makes the answer.")
    guard = _Guard(
        options=Options(
            timeout=seconds_of(timeout),
            shared=shared,
            scope=scope_of(scope),
            using=using,
            max_hold=max_hold_of(max_hold),
        ),
        methods=None if methods is None else _methods_of(methods),
        answer=on_busy or functools.partial(busy_response, status=status, retry_after=retry_after),
    )

    def decorate(view: View) -> View:
        where = f"lock_view on {getattr(view, '__qualname__', view)}"
        if not isinstance(view, type):
            return cast(View, _wrap(view, key, guard, where, is_async=iscoroutinefunction(view)))
        if hasattr(view, "initialize_request"):
            raise ConfigurationError(
                f"{where}: it authenticates the request inside dispatch(), too late for the key. Put "
                "django_pglock.contrib.rest_framework.lock_view on its handler methods."
            )
        view_class: Any = view
        is_async = bool(getattr(view, "view_is_async", False))
        view_class.dispatch = _wrap(view_class.dispatch, key, guard, where, is_async=is_async)
        return view

    return decorate


def _methods_of(value: Iterable[str]) -> frozenset[str]:
    given = () if isinstance(value, str) or not isinstance(value, Iterable) else value
    names = frozenset(str(method).upper() for method in given)
    if not names or not names.issubset(METHODS):
        raise ConfigurationError(
            f"lock_view: methods is {value!r}; give a list of {', '.join(METHODS)}, or None for all of them."
        )
    # Django answers HEAD by the view for GET.
    return names | {"HEAD"} if "GET" in names else names


def busy_response(
    error: LockNotAvailable, request: HttpRequest, *args: Any, status: int, retry_after: int, **kwargs: Any
) -> HttpResponse:
    """Return the answer to a request that came second. The lock's name stays inside: it may hold a user's id."""
    response = HttpResponse(busy_text(), status=status, content_type="text/plain; charset=utf-8")
    response["Retry-After"] = str(retry_after)
    return response


def busy_text() -> str:
    """Return what a person whose request came second is told."""
    return _("This is being done already. Please wait a moment before you try again.")


class _Guard:
    """What all requests of one decorated view have in common: options, no state."""

    def __init__(self, *, options: Options, methods: frozenset[str] | None, answer: Callable[..., Any]) -> None:
        self.options = options
        self.methods = methods
        self.answer = answer


def _wrap(view: Any, key: str, guard: _Guard, where: str, *, is_async: bool) -> Any:
    refuse_generators(view)
    template = ViewKey(key, view, where)

    def key_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        """Return the key for a request, or None if its method is let through."""
        if guard.methods is not None and _request_of(args).method not in guard.methods:
            return None
        return make_key(template.render(args, kwargs))

    @functools.wraps(view)
    def locked(*args: Any, **kwargs: Any) -> Any:
        key = key_for(args, kwargs)
        if key is None:
            return view(*args, **kwargs)
        handle = Handle([key], guard.options)
        try:
            handle.acquire(may_begin=True)
        except LockNotAvailable as busy:
            return guard.answer(busy, *_from_request(args), **kwargs)
        return _respond(handle, functools.partial(view, *args, **kwargs), where)

    @functools.wraps(view)
    async def locked_async(*args: Any, **kwargs: Any) -> Any:
        key = key_for(args, kwargs)
        if key is None:
            return await view(*args, **kwargs)
        handle = AsyncHandle([key], guard.options)
        try:
            await handle.acquire()
        except LockNotAvailable as busy:
            answer = guard.answer(busy, *_from_request(args), **kwargs)
            return await answer if inspect.isawaitable(answer) else answer
        return await _respond_async(handle, functools.partial(view, *args, **kwargs))

    return locked_async if is_async else locked


class ViewKey:
    """The key template of a view: over ``request`` and the view's parameters, however the URL passes them."""

    def __init__(self, key: str, view: Any, where: str) -> None:
        self._signature = inspect.signature(view)
        parameters = self._signature.parameters
        self._extra = [each.name for each in parameters.values() if each.kind is each.VAR_KEYWORD]
        known = None if self._extra else {*parameters, "request"}
        self._template = KeyTemplate(key, known=known, where=where)

    def render(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the name for a call. Raises ``LockKeyError`` where a field has no value."""
        return self._template.render({**self._arguments(args, kwargs), "request": _request_of(args)})

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError:
            # Another decorator below this one takes other arguments than the view.
            return kwargs
        bound.apply_defaults()
        values = dict(bound.arguments)
        for name in self._extra:
            values.update(values.pop(name))
        return values


def _from_request(args: tuple[Any, ...]) -> tuple[Any, ...]:
    # A method has its object before the request. By what it has and not by its class: other frameworks wrap Django's.
    return args[next(place for place, argument in enumerate(args) if hasattr(argument, "META")) :]


def _request_of(args: tuple[Any, ...]) -> Any:
    return _from_request(args)[0]


def _respond(handle: Handle, call: Callable[[], Any], where: str) -> Any:
    """Call the view and give the lock back, unless its response is still to be made or sent: then with that."""
    try:
        response = call()
        if _is_unfinished(response):
            if handle.scope == "session":
                ResponseLock(handle, response)
                return response
            if response.streaming:
                response.close()
                _refuse_stream(where)
    except BaseException as error:
        if handle.is_open:
            handle.release(error)
        raise
    handle.release()
    return response


async def _respond_async(handle: AsyncHandle, call: Callable[[], Any]) -> Any:
    """The same for coroutines. Their lock has a session outside of Django's, so that a stream keeps it in any scope."""
    try:
        response = await call()
        if _is_unfinished(response):
            handle.detach()
            ResponseLock(handle, response)
            return response
    except BaseException as error:
        if handle.is_open:
            await handle.release(error)
        raise
    await handle.release()
    return response


def _is_unfinished(response: Any) -> bool:
    """Say whether a response is streamed, or rendered (``TemplateResponse``), when the view has returned."""
    if not hasattr(response, "_resource_closers"):
        return False
    return bool(response.streaming) or not getattr(response, "is_rendered", True)


def _refuse_stream(where: str) -> NoReturn:
    raise ConfigurationError(
        f"{where}: the transaction, and with it the lock, ends before a streaming response is sent. Use "
        "scope='session' and take the view out of ATOMIC_REQUESTS."
    )
