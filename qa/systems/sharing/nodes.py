"""What the tests call in processes of their own."""

from __future__ import annotations

from unittest import mock

from example_project.systems.sharing import processing
from example_project.systems.sharing.models import Row
from tests.sql import execute_sql

#: The advisory lock that keeps nodes in the middle of their batch while the test holds it.
GATE = 72004


def process_behind_the_gate(node: str) -> None:
    """Process one batch; each row waits for the gate."""
    process = processing.process

    def wait_and_process(row: Row, node: str) -> None:
        execute_sql("SELECT pg_advisory_xact_lock_shared(%s)", [GATE])
        process(row, node)

    with mock.patch.object(processing, "process", wait_and_process):
        processing.process_batch(node)
