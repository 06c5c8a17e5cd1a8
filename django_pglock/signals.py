"""The signals of locks. The package itself has no receivers of them.

The sender is the class of the handle. Receivers get ``handle``. Signals are sent with ``send_robust``: an exception of
a receiver is logged and has no other effect.
"""

from django.dispatch import Signal

#: A lock was taken. Arguments: ``handle`` (its ``waited`` is in seconds).
lock_acquired = Signal()

#: A lock was released. Arguments: ``handle``, ``held`` (seconds).
lock_released = Signal()

#: A lock was busy and the caller did not get it. Arguments: ``handle``, ``waited`` (seconds).
lock_busy = Signal()

#: A lock was lost with its connection. Arguments: ``handle``, ``held`` (seconds).
lock_lost = Signal()
