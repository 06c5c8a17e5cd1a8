"""Task functions that raise exceptions whose classes raise when they are read."""

from __future__ import annotations

import sys
import time

from django_pglock import Cancel, Retry, task


class Refused(BaseException):
    """Raised by the exceptions below. Nobody catches it as an ``Exception``."""


def refuse(*args):
    raise RuntimeError("not to be read")


def leave(*args):
    sys.exit("not to be read")


def refuse_all(*args):
    raise Refused


class NoAttributes(Exception):
    __getattribute__ = refuse


class NoAttributesByExit(Exception):
    __getattribute__ = leave


class NoAttributesByBaseException(Exception):
    __getattribute__ = refuse_all


class NoText(Exception):
    __str__ = __repr__ = leave


class NoClass(Exception):
    __class__ = property(refuse)


class NoChain(Exception):
    __cause__ = __context__ = __traceback__ = __suppress_context__ = __notes__ = property(refuse)
    args = exceptions = sqlstate = property(leave)


class NoTruth(Exception):
    __len__ = __bool__ = __eq__ = refuse
    __hash__ = None


class Silent(type):
    """The metaclass of a class that has no name and no module."""

    __name__ = __module__ = property(refuse)

    def __getattribute__(cls, name):
        raise RuntimeError("not to be read")


class NoName(Exception, metaclass=Silent):
    pass


class NoModule(Exception):
    __module__ = property(refuse)


class NoAttributesToRetry(Retry):
    """The package reads attributes of its own class."""

    __getattribute__ = refuse


class NoAttributesToCancel(Cancel):
    __getattribute__ = refuse


class NoWayOut(BaseException):
    __getattribute__ = refuse_all
    __str__ = __repr__ = refuse_all


HOSTILE = {
    each.__name__: each
    for each in (
        *(NoAttributes, NoAttributesByExit, NoAttributesByBaseException, NoText, NoClass, NoChain, NoTruth, NoModule),
        *(NoAttributesToRetry, NoAttributesToCancel, NoWayOut),
    )
}
HOSTILE["NoName"] = NoName
if sys.version_info >= (3, 11):
    HOSTILE["NoMember"] = lambda: ExceptionGroup(  # noqa: F821
        "several", [NoAttributes(), NoName()]
    )


def throw(kind):
    """Raise an exception of a kind, also as a cause, or with one."""
    name, _, how = kind.partition(" ")
    if how == "as cause":
        raise ValueError("because of another one") from HOSTILE[name]()
    if how == "with cause":
        raise HOSTILE[name]() from HOSTILE[name]()
    raise HOSTILE[name]()


@task(max_attempts=2, backoff=0)
def throw_in_thread(kind):
    throw(kind)


@task(max_attempts=2, backoff=0, atomic=True)
def throw_atomically(kind):
    throw(kind)


@task(max_attempts=2, backoff=0, capture_logs=True)
async def throw_in_coroutine(kind):
    throw(kind)


@task(max_attempts=2, backoff=lambda error, result: str(error))
def throw_and_read_in_backoff(kind):
    throw(kind)


@task(max_attempts=2, backoff=lambda error, result: throw("NoAttributes"))
def throw_in_backoff(kind):
    throw(kind)


@task(timeout=0.2, max_attempts=2, backoff=0)
def throw_after_timeout(kind):
    try:
        while True:
            time.sleep(0.001)
    except TimeoutError:
        throw(kind)


@task(max_attempts=2, backoff=0)
def return_what_throws(kind):
    class Value(dict):
        def items(self):
            throw(kind)

        __iter__ = keys = items

    return Value(a=1)


@task(group="{kind}", max_attempts=2, backoff=0)
def throw_in_group(calls, kind=None):
    throw(calls[0]["kind"])
