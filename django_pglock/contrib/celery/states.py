"""The names of Celery for the state of a task."""

from __future__ import annotations

PENDING, STARTED, RETRY, SUCCESS, FAILURE, REVOKED = "PENDING", "STARTED", "RETRY", "SUCCESS", "FAILURE", "REVOKED"
#: That of a running task that has reported progress.
PROGRESS = "PROGRESS"
READY_STATES = frozenset({SUCCESS, FAILURE, REVOKED})
EXCEPTION_STATES = frozenset({RETRY, FAILURE, REVOKED})
UNREADY_STATES = frozenset({PENDING, STARTED, RETRY, PROGRESS})
PROPAGATE_STATES = frozenset({FAILURE, REVOKED})

#: The status of a row, where a state is another word for it.
OF_STATUS = {"RUNNING": STARTED, "SUCCESSFUL": SUCCESS, "FAILED": FAILURE, "CANCELLED": REVOKED}
