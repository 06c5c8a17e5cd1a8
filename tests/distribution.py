"""How ``pytest -n`` distributes the tests to its processes."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

#: Folders whose tests take long; then folders whose tests wait for threads and for dates. All others compute: at the
#: end they keep all processors busy.
TURNS = (("concurrency/", "plans/", "property/"), ("db/worker/", "db/locks/"))
#: Folders whose files share something that takes a process of tests long to make.
TOGETHER = ("tests/plans/store/",)


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Sends the tests of one file to the same process, and also all files of some folders."""

    def _split_scope(self, nodeid: str) -> str:
        path: str = super()._split_scope(nodeid)
        return next((folder for folder in TOGETHER if path.startswith(folder)), path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let several processes of tests begin with the files that wait, and end with those that compute."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _turn(item.path.as_posix().partition("/tests/")[2]))


def _turn(path: str) -> int:
    return next((turn for turn, folders in enumerate(TURNS) if path.startswith(folders)), len(TURNS))
