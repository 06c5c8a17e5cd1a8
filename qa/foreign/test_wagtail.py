"""What Wagtail does with tasks.

Wagtail enqueues by ``django_tasks``, the backport, whatever Django has: an update of the search index and one of the
reference index for each object that is saved, and the removal of an image's file after its row is gone. All three are
enqueued in the transaction of the change, and by arguments that say no more than which object it is.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from django.core.files.storage import default_storage
from django.db import transaction
from wagtail.contrib.redirects.models import Redirect
from wagtail.images import get_image_model
from wagtail.images.tests.utils import get_test_image_file
from wagtail.models import Collection, Locale, Page, ReferenceIndex

from django_pglock import lock
from django_pglock.models import Task
from qa.foreign.process import drain_elsewhere

SEARCH = "insert_or_update_object_task"
REFERENCES = "update_reference_index_task"
FILES = "delete_file_from_storage_task"

# As Wagtail does with snippets; of its own models, only pages with a body refer to pages.
ReferenceIndex.register_model(Redirect)


def enqueued() -> list[str]:
    """Return the functions of the tasks that wait, without their modules."""
    paths = Task.objects.filter(status="READY").order_by("id").values_list("task_path", flat=True)
    return [path.rpartition(".")[2] for path in paths]


@pytest.fixture(autouse=True)
def site() -> None:
    """The rows that the migrations of Wagtail make."""
    if not Locale.objects.exists():
        Locale.objects.create(language_code="en")
        Collection.add_root(name="Root")
        Page.add_root(title="Root", slug="root")


@pytest.fixture
def page() -> Page:
    root = Page.objects.get(depth=1)
    page = root.add_child(instance=Page(title="Zebra crossings", slug=f"page-{Page.objects.count()}"))
    return Page.objects.get(pk=page.pk)


def test_a_page_is_found_when_a_worker_has_been_there(page, drain):
    assert SEARCH in enqueued()
    assert REFERENCES in enqueued()
    drain()
    assert {*Task.objects.values_list("status", flat=True)} == {"SUCCESSFUL"}
    assert page.pk in [found.pk for found in Page.objects.search("Zebra")]
    page.title = "Yak crossings"
    with lock("page", page.pk):
        page.save_revision().publish()
    drain()
    assert page.pk in [found.pk for found in Page.objects.search("Yak")]
    assert page.pk not in [found.pk for found in Page.objects.search("Zebra")]


def test_a_worker_in_another_process_knows_its_functions(page):
    drain_elsewhere()
    assert {*Task.objects.values_list("status", flat=True)} == {"SUCCESSFUL"}
    assert page.pk in [found.pk for found in Page.objects.search("Zebra")]


def test_the_references_to_a_page_are_known_after_the_task(page, drain):
    Redirect.objects.create(old_path=f"/old-{page.pk}/", redirect_page=page)
    assert enqueued().count(REFERENCES) >= 2
    assert not ReferenceIndex.get_references_to(page).exists()
    drain()
    assert ReferenceIndex.get_references_to(page).count() == 1


def test_a_rolled_back_change_enqueues_no_task(page):
    before = enqueued()
    with suppress(ZeroDivisionError), transaction.atomic():
        page.title = "Xenops crossings"
        page.save()
        assert len(enqueued()) > len(before)
        raise ZeroDivisionError
    assert enqueued() == before


def test_the_file_of_an_image_is_deleted_after_its_row(drain):
    image = get_image_model().objects.create(title="Walrus", file=get_test_image_file())
    name = image.file.name
    drain()
    assert default_storage.exists(name)
    with transaction.atomic():
        image.delete()
        assert FILES not in enqueued()
    assert FILES in enqueued()
    assert default_storage.exists(name)
    drain()
    assert not default_storage.exists(name)
    assert {*Task.objects.values_list("status", flat=True)} == {"SUCCESSFUL"}
