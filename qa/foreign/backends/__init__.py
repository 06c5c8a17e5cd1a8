"""Database backends as projects write them for passwords that are made for each connection.

``TOKENS`` stands for the cloud's service: it knows the password of the moment, and nothing in the settings does.
"""

from __future__ import annotations

import os
from itertools import count

_numbers = count(1)


class Tokens:
    """Makes the password of the moment, and notes how often it was asked for."""

    def __init__(self) -> None:
        # A process that is started knows what its parent does.
        self.current = os.environ.get("PGLOCK_FOREIGN_TOKEN", "first")
        self.asked = 0

    def rotate(self) -> str:
        """Change the password. The server refuses an old password as soon as it knows the new one."""
        self.current = f"token-{next(_numbers)}"
        return self.current

    def token(self) -> str:
        self.asked += 1
        return self.current


TOKENS = Tokens()
