"""Which views are tried on which servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.web.sites import ALL, KINDS

#: Views that are coroutines.
ASYNC = frozenset({"plain_async", "waits_async", "stream_async"})
#: Responses of sync views that outlast the view, which a transaction does not.
OUTLASTING = frozenset({"stream", "file"})


def on_servers(sites: Iterable[str] = ALL) -> pytest.MarkDecorator:
    """Run a test on each of these servers."""
    return pytest.mark.parametrize("site", list(sites), indirect=True)


def on_servers_with(name: str, values: Iterable[Any], sites: Iterable[str] = ALL) -> pytest.MarkDecorator:
    """Run a test on each of these servers with each value that goes there: a view, or a view and more."""
    values = list(values)
    pairs = [(site, value) for site in sites for value in values if _goes(site, _view_of(value))]
    ids = [f"{site}-{value if isinstance(value, str) else '-'.join(value)}" for site, value in pairs]
    return pytest.mark.parametrize(("site", name), pairs, indirect=["site"], ids=ids)


def is_cancelled(site: str, view: str) -> bool:
    """Say whether a server ends a view, wherever it is, when its client is gone: a thread cannot be ended."""
    return KINDS[site].is_asgi and view in ASYNC


def _view_of(value: Any) -> str:
    return value if isinstance(value, str) else value[0]


def _goes(site: str, view: str) -> bool:
    kind = KINDS[site]
    return (kind.has_asyncio or view not in ASYNC) and not (kind.is_scope_transaction and view in OUTLASTING)
