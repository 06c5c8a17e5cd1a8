"""The heartbeat file: its age is the age of the last heartbeat, for probes that check a file instead of HTTP."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

from django_pglock.errors import ConfigurationError
from django_pglock.loggers import WORKER, get_logger

logger = get_logger(WORKER)


class HeartbeatFile:
    """An empty file that is touched at each beat and removed at the end. Without a path there is no file.

    Each process of a supervisor has its own file, by its ``number``: ``path``, ``path.2``, ``path.3``...
    """

    def __init__(self, path: str | None, *, number: int = 1) -> None:
        self.path = Path(path if number == 1 else f"{path}.{number}") if path is not None else None
        self._has_failed = False
        # One thread touches the file, and another one removes it. After that it must not be created again.
        self._moving = threading.Lock()

    def check(self) -> None:
        """Raise ``ConfigurationError`` if the file cannot be written. Does not create it, as there is no beat yet."""
        if self.path is None:
            return
        try:
            if self.path.exists():
                self.path.open("ab").close()
            else:
                tempfile.TemporaryFile(dir=self.path.parent).close()
        except OSError as error:
            raise ConfigurationError(f"The heartbeat file {self.path} cannot be written: {error.strerror}.") from None

    def touch(self) -> None:
        """Set the file's mtime to now. Create a missing file. The first failure is logged, and none is raised."""
        with self._moving:
            if self.path is None:
                return
            try:
                self.path.touch()
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning(
                        "The heartbeat file %s cannot be written. The worker continues to run tasks: %s",
                        self.path,
                        error,
                    )
            else:
                self._has_failed = False

    def remove(self) -> None:
        """Remove the file for good: the worker has ended in order, or another process replaces it."""
        with self._moving:
            path, self.path = self.path, None
        if path is not None:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("The heartbeat file %s cannot be removed: %s", path, error)
