"""``lock_view``: the second of two requests at once gets a 409 response instead of a second charge."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from asgiref.sync import iscoroutinefunction

from django_pglock.errors import ConfigurationError, LockKeyError, LockNotAvailable
from django_pglock.keys.template import KeyTemplate
from django_pglock.locks.coroutines import AsyncHandle
from django_pglock.locks.lock import Lock, Naming
from django_pglock.locks.request import Request, Timeout, request_of
from django_pglock.locks.responses import ResponseLock, busy_response

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class ViewOptions(TypedDict, total=False):
        """The options of ``lock`` that ``lock_view`` takes, too."""

        timeout: Timeout
        shared: bool
        scope: str | None
        using: str | None
        max_hold: Timeout


__all__ = ["lock_view"]

View = TypeVar("View", bound=Callable[..., Any])
#: The allowed statuses of the response to a busy lock. Others would mean something else to the client.
STATUSES = (409, 423, 429, 503)
#: The methods of a request. Another name would lock nothing.
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def lock_view(
    key: str,
    *,
    status: int = 409,
    retry_after: int = 1,
    methods: Iterable[str] | None = None,
    on_busy: Callable[..., Any] | None = None,
    **options: Unpack[ViewOptions],
) -> Callable[[View], View]:
    """Run a view, sync or async, function or class, under a lock. Answer at once if another request holds it.

    - ``key``: a template over ``request`` and the view's parameters: ``"checkout:{request.user.pk}"``. A value that
      is None, such as the primary key of an anonymous user, raises ``LockKeyError``: put the login check outside.
    - ``timeout``: seconds or a timedelta to wait; default 0, because each waiter occupies a web worker.
    - ``status``: 409 (default), 423, 429 or 503; ``retry_after``: seconds in the header of that answer.
    - ``methods``: lock only these, for example ``["POST"]``; default all. HEAD is locked where GET is.
    - ``on_busy``: a callable ``(exception, request, *args, **kwargs)`` that makes the response instead of
      ``busy_response``: a page, a problem detail or plain text, as the client prefers.
    - ``shared``, ``scope``, ``using``, ``max_hold`` as for ``lock``.

    A streaming response, or a response that is rendered after the view has returned (``TemplateResponse``), keeps a
    session lock until the response is closed or garbage-collected.

    Raises ``LockKeyError`` and ``ConfigurationError``, when the decorator is applied, for an invalid template or view.
    """
    if not isinstance(key, str):
        raise ConfigurationError(f"lock_view was given {key!r} as its key; write @lock_view('order:{{order_id}}').")
    if status not in STATUSES:
        raise ConfigurationError(f"lock_view cannot answer with {status!r}; use one of {STATUSES}.")
    check_retry_after(retry_after)
    if on_busy is not None and not callable(on_busy):
        raise ConfigurationError(f"lock_view: on_busy is {on_busy!r}; give a function that makes the answer.")
    options.setdefault("timeout", 0)
    return ViewLock(
        key,
        request_of("lock_view", **options),
        methods=None if methods is None else _methods_of(methods),
        on_busy=on_busy or functools.partial(busy_response, status=status, retry_after=retry_after),
    )


def check_retry_after(value: object) -> None:
    """Raise ``ConfigurationError`` for a value that the header ``Retry-After`` cannot have."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"lock_view: retry_after is {value!r}; give whole seconds, 0 or more.")


def _methods_of(value: Iterable[str]) -> frozenset[str]:
    given = () if isinstance(value, str) or not isinstance(value, Iterable) else value
    names = frozenset(str(method).upper() for method in given)
    if not names or not names.issubset(METHODS):
        raise ConfigurationError(
            f"lock_view: methods is {value!r}; give a list of {', '.join(METHODS)}, or None for all of them."
        )
    # Django answers HEAD by the view for GET.
    return names | {"HEAD"} if "GET" in names else names


class ViewLock(Lock):
    """Options of a lock around requests; made by ``lock_view()``."""

    def __init__(
        self, key: str, request: Request, *, methods: frozenset[str] | None, on_busy: Callable[..., Any]
    ) -> None:
        super().__init__((), request, on_busy)
        self._key = key
        self._methods = methods

    def __call__(self, view: View) -> View:
        """Decorate a view, a function or a class. Raises ``LockKeyError`` and ``ConfigurationError``."""
        where = f"lock_view on {getattr(view, '__qualname__', view)}"
        if not isinstance(view, type):
            return cast(View, self._wrap(view, where, is_async=iscoroutinefunction(view) or _is_async_dispatch(view)))
        if hasattr(view, "initialize_request"):
            raise ConfigurationError(
                f"{where}: it authenticates the request inside dispatch(), too late for the key. Put lock_view on its "
                "handler methods."
            )
        view_class: Any = view
        view_class.dispatch = self._wrap_dispatch(view_class.dispatch, where)
        return view

    def _wrap_dispatch(self, dispatch: Any, where: str) -> Any:
        """Return the method for a class. It asks at each call whether the view is async: a subclass may be."""
        locked = self._wrap(dispatch, where, is_async=False)
        locked_async = self._wrap(dispatch, where, is_async=True)

        @functools.wraps(dispatch)
        def either(view: Any, *args: Any, **kwargs: Any) -> Any:
            is_async = getattr(view, "view_is_async", False)
            return (locked_async if is_async else locked)(view, *args, **kwargs)

        return either

    def _wrap(self, view: Any, where: str, *, is_async: bool) -> Any:
        naming = self._view_naming(ViewKey(self._key, view, where))
        decorate = self._decorate_async if is_async else self._decorate
        locked: Any = decorate(view, naming, functools.partial(_keep, where))
        # A framework that reads the annotations of the view would look for their names in the module of the decorator.
        with suppress(Exception):
            locked.__signature__ = inspect.signature(view, eval_str=True)
        return locked

    def _view_naming(self, key: ViewKey) -> Naming:
        def naming(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str] | None:
            if self._methods is not None and _request_of(args, kwargs).method not in self._methods:
                return None
            return (key.render(args, kwargs),)

        return naming

    def _answer_busy(self, busy: LockNotAvailable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        others = {name: value for name, value in kwargs.items() if name != "request"}
        answer = super()._answer_busy(busy, _from_request(args, kwargs), others)
        return self._awaited(answer) if inspect.isawaitable(answer) else self._checked(answer)

    async def _awaited(self, answer: Awaitable[Any]) -> Any:
        return self._checked(await answer)

    def _checked(self, answer: Any) -> Any:
        """Return the response. Raises ``ConfigurationError`` for None: the caller of the view would fail later."""
        if answer is None:
            name = getattr(self._on_busy, "__qualname__", self._on_busy)
            raise ConfigurationError(
                f"lock_view: the function {name} of on_busy returned None; let it return the response to the request."
            )
        return answer


class ViewKey:
    """The key template of a view: over ``request`` and the view's parameters, positional or by keyword."""

    def __init__(self, key: str, view: Any, where: str) -> None:
        self._signature = inspect.signature(view)
        parameters = self._signature.parameters
        self._extra = [each.name for each in parameters.values() if each.kind is each.VAR_KEYWORD]
        known = None if self._extra else {*parameters, "request"}
        self._template = KeyTemplate(key, known=known, where=where)

    def render(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the name for a call. Raises ``LockKeyError`` where a field has no value."""
        request = _request_of(args, kwargs)
        try:
            return self._template.render({**self._arguments(args, kwargs), "request": request})
        except LockKeyError as error:
            if not (hint := self._hint(request)):
                raise
            raise LockKeyError(f"{error} {hint}") from error

    def _hint(self, request: Any) -> str:
        """Return what to do if the key has no value because the request has no user or an anonymous one."""
        if "user" not in self._template.names:
            return ""
        if not hasattr(request, "user"):
            return "Add django.contrib.auth.middleware.AuthenticationMiddleware to MIDDLEWARE."
        if getattr(request.user, "is_authenticated", True):
            return ""
        return "No user is logged in: log in first, or put @login_required above @lock_view."

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError:
            # A decorator below this one takes other arguments than the view.
            return kwargs
        bound.apply_defaults()
        values = dict(bound.arguments)
        for name in self._extra:
            values.update(values.pop(name))
        return values


def _is_async_dispatch(view: Any) -> bool:
    """Return whether this is the ``dispatch`` of an async view, as ``method_decorator`` passes it to a decorator."""
    method = getattr(view, "func", view)
    view_object = getattr(method, "__self__", None)
    return getattr(method, "__name__", "") == "dispatch" and bool(getattr(view_object, "view_is_async", False))


def _from_request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    # A method has its object before the request. Not found by the class of a request: other frameworks wrap Django's.
    for place, argument in enumerate(args):
        if hasattr(argument, "META"):
            return args[place:]
    if "request" not in kwargs:
        raise ConfigurationError("lock_view: no argument of the call is a request. Use lock for other functions.")
    return (kwargs["request"],)


def _request_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _from_request(args, kwargs)[0]


def _keep(where: str, handle: Any, response: Any) -> bool:
    """Keep the lock with a response that is streamed or rendered (``TemplateResponse``) after the view has returned.

    Returns whether this is the case. Raises ``ConfigurationError`` for a stream with a transaction lock.
    """
    if not hasattr(response, "_resource_closers"):
        return False
    if not response.streaming and getattr(response, "is_rendered", True):
        return False
    if isinstance(handle, AsyncHandle):
        # In any scope, because the lock of a coroutine has a session outside of Django's.
        handle.detach()
    elif handle.scope == "transaction" and response.streaming:
        response.close()
        raise ConfigurationError(
            f"{where}: the transaction, and with it the lock, ends before a streaming response is sent. Use "
            "scope='session' and take the view out of ATOMIC_REQUESTS."
        )
    elif handle.scope == "transaction":
        return False
    ResponseLock(handle, response)
    return True
