"""Makes the clock of a Python wrong by WRONG_CLOCK seconds. Python imports this at its start from PYTHONPATH.

It changes what a program learns about the time of day, as a wrong clock of the machine would. Monotonic clocks, which
count from the start of the machine, are right on such a machine too.
"""

import datetime
import os
import time

OFFSET = float(os.environ.get("WRONG_CLOCK", "0"))
RealDatetime = datetime.datetime
real_time, real_time_ns = time.time, time.time_ns


class InstancesAreDatetimes(type):
    """Lets ``isinstance(value, datetime)`` be true for values that C code makes, of the class that was there before."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, RealDatetime)

    def __subclasscheck__(cls, subclass):
        return issubclass(subclass, RealDatetime)


class WrongDatetime(RealDatetime, metaclass=InstancesAreDatetimes):
    """``datetime`` with the wrong time of day."""

    __slots__ = ()  # C extensions check the size of instances

    @classmethod
    def now(cls, tz=None):
        return RealDatetime.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)

    @classmethod
    def today(cls):
        return cls.now()


if OFFSET:
    WrongDatetime.__name__ = WrongDatetime.__qualname__ = "datetime"
    WrongDatetime.__module__ = "datetime"
    time.time = lambda: real_time() + OFFSET
    time.time_ns = lambda: real_time_ns() + int(OFFSET * 1e9)
    datetime.datetime = WrongDatetime
