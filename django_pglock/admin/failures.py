"""The admin page of failures: failed tasks in groups, and the operations on whole groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import models, router, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_pglock.admin.charts import Chart, Line, whole
from django_pglock.admin.pages import AtLeast, PageOnly, ReadOnlyAdmin, needs, record, value_of
from django_pglock.errors import ConfigurationError
from django_pglock.models import Task
from django_pglock.store.bulk import enqueue_redrive, redrives
from django_pglock.store.failures import FailureCounts, failures, in_group, newest_failure
from django_pglock.store.id_range import id_in
from django_pglock.store.operate import DISCARD, RETRY, Verb

#: The largest number of tasks that the page counts in a group.
MOST_IN_GROUP = 1000


class FailureGroup(models.Model):
    """The name under which admin sites list the page. The failed tasks have the fingerprints."""

    class Meta(PageOnly):
        verbose_name = gettext_lazy("failure")
        verbose_name_plural = gettext_lazy("failures")

    def __str__(self) -> str:
        return str(self._meta.verbose_name)


@admin.register(FailureGroup)
class FailureGroupAdmin(ReadOnlyAdmin):
    """The page of all groups, and the confirmation of a change of all tasks of a group."""

    #: What can be done with a group.
    verbs: ClassVar[Mapping[str, Verb]] = {verb.name: verb for verb in (RETRY, DISCARD)}

    # Groups have no permission of their own.
    has_view_permission = has_module_permission = needs("view_task")
    has_retry_permission = needs("retry_task")
    has_cancel_permission = needs("cancel_task")

    def get_urls(self) -> list[URLPattern]:
        """Return the page, and the address of the verbs of a group."""
        return [
            self.own_path("", "changelist", self.changelist_view),
            self.own_path("<path:object_id>/do/<str:verb>/", "verb", self.verb_view, "POST"),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the groups."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        groups = failures(Task.objects.db, most=MOST_IN_GROUP)
        running = redrives(Task.objects.db, [each.fingerprint for each in groups])
        # Each with its count, its chart, and the task that retries it at this moment.
        rows = [
            (each, AtLeast(each.count) if each.is_capped else each.count, chart_of(each), running.get(each.fingerprint))
            for each in groups
        ]
        verbs = [verb for verb in self.verbs.values() if self.may(request, verb)]
        about = {"title": capfirst(self.opts.verbose_name_plural), "rows": rows, "verbs": verbs}
        return self.answer(request, "failuregroup/change_list", {**about, **(extra_context or {})})

    def verb_view(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Apply a verb to a group: only by POST, with CSRF protection, and after a confirmation."""
        found = self.verbs.get(verb)
        if found is None or not self.has_view_permission(request) or not self.may(request, found):
            raise PermissionDenied
        number = id_in(object_id)
        if number is None:
            raise Http404
        rows = in_group(Task.objects.using(router.db_for_write(Task)), number)
        newest = newest_failure(rows.db, number)
        if newest is None:
            messages.warning(request, _("No task of this group is failed any more."))
        elif "confirmed" not in request.POST:
            label = _("Tasks a second; leave this empty to retry all tasks at once:") if found is RETRY else ""
            about = {"subject": " ".join(filter(None, reversed(newest))), "value_label": label, "is_optional": True}
            return self.question(request, found, rows, **about)
        elif found is RETRY and value_of(request):
            self._redrive(request, number)
        else:
            self.perform(found, request, rows, "")
        return HttpResponseRedirect(self.address("changelist"))

    def _redrive(self, request: HttpRequest, number: int) -> None:
        try:
            rate = float(value_of(request))
            with transaction.atomic(using=router.db_for_write(Task)):
                dependants = "related" in request.POST
                made, is_new = enqueue_redrive(router.db_for_write(Task), number, rate, dependants=dependants)
                if is_new:
                    text = f"redrive: group {number}, {rate:g} tasks a second, by #{made}"
                    record(request, Task, text, object_id=str(made))
        except ValueError:
            messages.error(request, _("Enter a number of tasks a second, such as 10."))
            return
        except ConfigurationError as error:
            messages.error(request, str(error))
            return
        text = _("A worker retries the tasks, at most {rate} a second. Progress, and a button to cancel: {link}")
        if not is_new:
            text = _("The group is retried already, so nothing was changed. Progress, and a button to cancel: {link}")
        messages.info(request, format_html(text, rate=f"{rate:g}", link=self.link_to_task(made)))


def chart_of(group: FailureCounts) -> str:
    """Return bars for the failures of the last hours as SVG, with the numbers as its title."""
    title = _("Failures in each of the last {hours} hours: {numbers}")
    title = title.format(hours=len(group.by_hour), numbers=", ".join(map(str, group.by_hour)))
    line = Line(_("failed"), "bad", group.by_hour)
    return Chart(f"group{group.fingerprint}", title, [""] * len(group.by_hour), [line], whole, is_stacked=True).drawing
