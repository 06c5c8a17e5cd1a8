"""Functions whose calls are captured changes."""

from __future__ import annotations

from django_pglock import Rate, Unique, task
from tests.sample.models import Effect


@task
def reindex(ids): ...


@task(max_attempts=4, priority=7, queue_name="search", keep_result=60, meta={"by": "trigger"}, redact=("ids",))
def follow(ids, operation, model, schema, force=False): ...


@task
def refresh(): ...


@task(unique=True)
def rebuild(id): ...


@task(lock="product:{id}", fair="{model}:{schema}")
def publish_in_order(id, model, schema): ...


@task(rate=Rate(10, key="{model}"))
def announce(model): ...


@task(group="{model}:{id}")
def digest_each(calls): ...


@task
def take_everything(**values): ...


@task(lock="product:{id}", atomic=True)
def note(id, operation):
    Effect.objects.create(name=operation, number=id)


# What a capture cannot call, or what would lose changes


@task
def needs_more(ids, price): ...


@task
def has_both(id, ids): ...


@task(unique=Unique(while_="unfinished"))
def unique_while_unfinished(id): ...


@task(unique=Unique(on_conflict="raise"))
def raising(id): ...


@task(lock="product:{ids}")
def locked_by_ids(ids): ...
