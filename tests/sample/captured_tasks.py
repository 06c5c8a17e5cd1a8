"""Tasks that triggers enqueue. Most tests look at the row of the task, so most functions do nothing."""

from __future__ import annotations

from datetime import timedelta

from django_pglock import Group, Rate, Unique, task
from tests.sample.models import Effect


@task
def reindex(ids): ...


@task(max_attempts=4, priority=7, queue_name="search", keep_result=60, meta={"by": "trigger"}, redact=("ids",))
def follow(ids, operation, model, schema, force=False): ...


@task
def refresh(): ...


@task(unique=True, redact=("id",))
def unique_and_redacted(id): ...


@task(unique=True)
def rebuild(): ...


@task(unique=True)
def publish(id, operation, schema, force=False): ...


@task(unique=True)
def publish_once(id, model, operation, schema): ...


@task(unique="{id}", lock="product:{id}", concurrency=2)
def ship(id): ...


@task(lock="search", fair="{model}:{schema}")
def publish_in_order(id, model, schema): ...


@task(rate=Rate(10, key="{model}"))
def announce(model): ...


@task(group=Group("{model}", gather=timedelta(seconds=30)))
def digest(calls): ...


@task(group="{model}:{id}")
def digest_each(calls): ...


@task
def note(ids, operation):
    Effect.objects.bulk_create(Effect(name=operation, number=id_) for id_ in ids)


@task(lock="note:{model}")
def note_in_order(ids, model):
    Effect.objects.bulk_create(Effect(name=model, number=id_) for id_ in ids)


@task(unique=True)
def note_price(id):
    from tests.sample.models import Product

    Effect.objects.create(name="price", number=Product.objects.get(pk=id).price)


# What a trigger cannot keep


@task(unique=True)
def unique_by_ids(ids): ...


@task(unique="{id}")
def unique_without_operation(id, operation): ...


@task(unique=Unique(while_="unfinished"))
def unique_while_unfinished(id): ...


@task(unique=Unique(on_conflict="replace"))
def replacing(id): ...


@task(lock="product:{ids}")
def locked_by_ids(ids): ...


@task(lock="product:{id}")
def locked_by_id(id): ...


@task
def needs_more(ids, price): ...


@task
def has_both(id, ids): ...
