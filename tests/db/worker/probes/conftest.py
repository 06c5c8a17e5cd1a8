"""What the tests of probes may use."""

from __future__ import annotations

from contextlib import ExitStack

import pytest


@pytest.fixture
def probed(worker):
    def start(**options):
        return worker(probe_port="127.0.0.1:0", **options)

    return start


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack
