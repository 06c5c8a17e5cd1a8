"""Work of the demo beside the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from django.db import connections


class Background(threading.Thread):
    """Runs a function at once. An error is kept for ``finish()``, so that nothing is printed after Ctrl-C."""

    def __init__(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        super().__init__(daemon=True)
        self._call = (function, args, kwargs)
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Call the function."""
        function, args, kwargs = self._call
        try:
            function(*args, **kwargs)
        except BaseException as error:
            self._error = error
        finally:
            connections.close_all()

    def finish(self, timeout: float) -> None:
        """Wait for the end, for ``timeout`` seconds at most. Raises what the function has raised."""
        self.join(timeout)
        self.check()

    def check(self) -> None:
        """Raise what the function has raised so far."""
        if self._error is not None:
            raise self._error
