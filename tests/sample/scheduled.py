"""Functions for schedules. Tests decorate them, one by one: a worker keeps the schedules of all that it knows."""

from __future__ import annotations

from tests.sample.models import Effect


def nightly(name="nightly"):
    Effect.objects.create(name=name)


def hourly(name="hourly"):
    Effect.objects.create(name=name)


def with_argument(number): ...


def with_keyword(*, number): ...


def with_context(context): ...


def weekly(): ...


def monthly(): ...
