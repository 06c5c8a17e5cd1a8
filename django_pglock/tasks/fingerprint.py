"""The fingerprint of a failure: one number for all failures of one function, one exception class and one place."""

from __future__ import annotations

import hashlib


def fingerprint_of(task_path: str, exception_path: str, place: str = "") -> int:
    """Return a number of 63 bits: it fits into a ``bigint``, and people can type it without a sign.

    ``place`` is the module and the function of the last own frame. It is empty if no traceback is known.
    """
    text = f"{task_path}\n{exception_path}\n{place}"
    return int.from_bytes(hashlib.sha256(text.encode(errors="backslashreplace")).digest()[:8], "big") >> 1
