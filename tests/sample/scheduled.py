"""Functions for schedules. Each test decorates what it needs: a worker enqueues the ticks of all known functions."""

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
