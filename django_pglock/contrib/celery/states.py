"""The names of Celery for the state of a task."""

PENDING, STARTED, RETRY, SUCCESS, FAILURE, REVOKED = "PENDING", "STARTED", "RETRY", "SUCCESS", "FAILURE", "REVOKED"
#: That of a running task that has reported progress.
PROGRESS = "PROGRESS"
READY_STATES = frozenset({SUCCESS, FAILURE, REVOKED})
#: The status of a row, where a state is another word for it.
OF_STATUS = {"RUNNING": STARTED, "SUCCESSFUL": SUCCESS, "FAILED": FAILURE, "CANCELLED": REVOKED}
