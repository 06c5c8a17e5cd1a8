"""Copy what the tests need to another folder, so that the package under test is the one that was installed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

WANTED = ("tests", "qa", "docs", "deploy", "example_project", "manage.py", "pyproject.toml", "README.md")


def copy(source: Path, target: Path) -> None:
    """Copy ``WANTED`` from ``source`` to ``target``, in place of what is there."""
    target.mkdir(parents=True, exist_ok=True)
    for name in WANTED:
        old, new = source / name, target / name
        if old.is_dir():
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(old, new, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(old, new)


if __name__ == "__main__":
    copy(Path(sys.argv[1]), Path(sys.argv[2]))
