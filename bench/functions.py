"""Count the functions of the package that `with lock("a")` passes, and all Python calls, in a warm process.

/tmp/bench/bin/python bench/functions.py [--names]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.locks import prepare
from example_project.postgres import PrivatePostgres

OURS = "/django_pglock/"


def passed(use) -> tuple[Counter[tuple[str, str]], int]:
    """Return how often each function of the package was called, and the number of all calls."""
    ours: Counter[tuple[str, str]] = Counter()
    calls = 0

    def trace(frame, event, arg):
        nonlocal calls
        if event == "call":
            calls += 1
            if OURS in frame.f_code.co_filename:
                name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from Python 3.11 on
                ours[frame.f_code.co_filename.partition(OURS)[2], name] += 1

    sys.setprofile(trace)
    try:
        use()
    finally:
        sys.setprofile(None)
    return ours, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="name each function")
    arguments = parser.parse_args()
    with PrivatePostgres() as postgres:
        prepare(str(postgres.folder))
        from django_pglock import lock

        def use() -> None:
            with lock("a"):
                pass

        for _ in range(3):
            use()
        ours, calls = passed(use)
    files = {file for file, _ in ours}
    print(f'with lock("a"): {len(ours)} functions in {len(files)} files, {sum(ours.values())} calls; {calls} in all')
    for (file, name), count in sorted(ours.items()) if arguments.names else ():
        print(f"{count:4} {file} {name}")


main()
