"""Which views are tried on which servers.

The short form tries each view, at each place in it, on a quarter of the servers that can serve it, and each view on
another quarter. ``PGLOCK_WEB=all`` tries each on all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import pytest

from qa.web.sites import ALL, KINDS

IS_SHORT = os.environ.get("PGLOCK_WEB") != "all"
#: Views that are coroutines.
ASYNC = frozenset({"plain_async", "waits_async", "stream_async"})
#: Responses of sync views that outlast the view, which a transaction does not.
OUTLASTING = frozenset({"stream", "file"})


def on_servers(sites: Iterable[str] = ALL) -> pytest.MarkDecorator:
    """Run a test on each of these servers."""
    return pytest.mark.parametrize("site", [pytest.param(site, marks=_together(site)) for site in sites], indirect=True)


def on_servers_with(name: str, values: Iterable[Any], sites: Iterable[str] = ALL) -> pytest.MarkDecorator:
    """Run a test on these servers with each value that goes there: a view, or a view and more."""
    values, sites = list(values), list(sites)
    cases = [
        pytest.param(site, value, id=f"{site}-{_name_of(value)}", marks=_together(site))
        for site in sites
        for value in values
        if site in sites_of(value, sites)
    ]
    return pytest.mark.parametrize(("site", name), cases, indirect=["site"])


def sites_of(value: Any, sites: Iterable[str]) -> list[str]:
    """Return the servers on which a value is tried: of those that can serve it, in the short form, one of four."""
    able = [site for site in sites if ways_to(site, [value])]
    if not IS_SHORT:
        return able
    able.sort(key=lambda site: crc32(f"{site} {_name_of(value)}".encode()))
    return able[: (len(able) + 3) // 4]


def _together(site: str) -> pytest.MarkDecorator:
    # One process of pytest-xdist runs them all, or a server would be started in each.
    return pytest.mark.xdist_group(site)


def _name_of(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(value)


def ways_to(site: str, values: Iterable[Any]) -> list[Any]:
    """Return those of these views, or of tuples that begin with one, which a server can serve."""
    return [value for value in values if _goes(site, _view_of(value))]


def is_cancelled(site: str, view: str) -> bool:
    """Return whether a server ends a view, wherever it is, when its client is gone: a thread cannot be ended."""
    return KINDS[site].is_asgi and view in ASYNC


def _view_of(value: Any) -> str:
    return value if isinstance(value, str) else value[0]


def _goes(site: str, view: str) -> bool:
    kind = KINDS[site]
    return (kind.has_asyncio or view not in ASYNC) and not (kind.is_scope_transaction and view in OUTLASTING)
