"""Signals for others to hear. We never depend on them ourselves.

The sender of a lock signal is the handle's class; receivers get ``handle``. Signals are sent with ``send_robust``, so a
receiver that raises is logged and harms nobody.
"""

from django.dispatch import Signal

#: A lock was taken. Arguments: ``handle`` (its ``waited`` is in seconds).
lock_acquired = Signal()

#: A lock was given back. Arguments: ``handle``, ``held`` (seconds).
lock_released = Signal()

#: A lock was busy and the caller did not get it. Arguments: ``handle``, ``waited`` (seconds).
lock_busy = Signal()

#: A lock was lost with its connection. Arguments: ``handle``, ``held`` (seconds).
lock_lost = Signal()
