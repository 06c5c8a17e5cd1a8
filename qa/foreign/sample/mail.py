"""A mail backend that refuses some messages for a while."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.mail.backends.locmem import EmailBackend


class Backend(EmailBackend):
    """Keeps messages in memory. A message to somebody at ``away.example`` is refused as often as ``refusals`` says."""

    refusals: ClassVar[list[str]] = []

    def send_messages(self, messages: Any) -> int:
        for message in messages:
            if self.refusals and message.to[0].endswith("@away.example"):
                raise OSError(self.refusals.pop())
        return super().send_messages(messages)
