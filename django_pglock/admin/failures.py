"""The admin page of failures: failed tasks in groups, and the operations on whole groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import models, router, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_pglock.admin.actions import perform, question_of, record
from django_pglock.admin.pages import AtLeast, PageOnly, ReadOnlyAdmin, elapsed, needs
from django_pglock.errors import ConfigurationError
from django_pglock.models import Task
from django_pglock.store.bulk import enqueue_redrive, redrives
from django_pglock.store.failures import FailureCounts, failures, in_group, newest_failure
from django_pglock.store.operate import DISCARD, RETRY, Verb

#: The largest number of tasks that the page counts in a group.
MOST_IN_GROUP = 1000
#: The size of the chart of the last hours: the width of a bar with its gap, the width of a bar, the height.
STEP, BAR, HEIGHT = 5, 4, 24


class FailureGroup(models.Model):
    """The name under which admin sites list the page. The failed tasks have the fingerprints."""

    class Meta(PageOnly):
        verbose_name = gettext_lazy("failure")
        verbose_name_plural = gettext_lazy("failures")

    def __str__(self) -> str:
        return str(self._meta.verbose_name)


class FailureGroupAdmin(ReadOnlyAdmin):
    """The page of all groups, and the confirmation of a change of all tasks of a group."""

    #: What can be done with a group.
    verbs: ClassVar[dict[str, Verb]] = {verb.name: verb for verb in (RETRY, DISCARD)}

    # Groups have no permission of their own.
    has_view_permission = has_module_permission = needs("view_task")

    def get_urls(self) -> list[URLPattern]:
        """Return the page, and the address of the verbs of a group."""
        return [
            self.own_path("", "changelist", self.changelist_view),
            self.own_path("<int:number>/do/<str:verb>/", "verb", self.verb_view, "GET", "HEAD", "POST"),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the groups."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        rows = list(self._rows(failures(Task.objects.db, most=MOST_IN_GROUP)))
        about = {"title": capfirst(self.opts.verbose_name_plural), "rows": rows, "may": self._may(request)}
        return self.answer(request, "failuregroup/change_list", {**about, **(extra_context or {})})

    def verb_view(self, request: HttpRequest, number: int, verb: str) -> HttpResponse:
        """Apply a verb to a group by POST, with CSRF protection; ask for confirmation by GET."""
        if not self.has_view_permission(request) or verb not in self._may(request):
            raise PermissionDenied
        if number >= 2**63:
            raise Http404
        using = router.db_for_write(Task)
        newest = newest_failure(using, number)
        if newest is None:
            messages.warning(request, _("No task of this group is failed any more."))
        elif request.method != "POST":
            return self._confirmation(request, number, verb, *newest)
        elif verb == "retry" and request.POST.get("rate"):
            self._redrive(request, number)
        else:
            perform(self.verbs[verb], request, in_group(Task.objects.using(using), number))
        return HttpResponseRedirect(self.address("changelist"))

    def _may(self, request: HttpRequest) -> list[str]:
        """Return the verbs that the user may apply."""
        return [
            name for name, verb in self.verbs.items() if request.user.has_perm(f"django_pglock.{verb.permission}_task")
        ]

    # The page

    def _rows(self, groups: list[FailureCounts]) -> Iterator[dict[str, Any]]:
        """Yield the groups as lines of the table, each with the task that retries it at this moment."""
        now, running = timezone.now(), redrives(Task.objects.db, [group.fingerprint for group in groups])
        tasks = reverse("admin:django_pglock_task_changelist", current_app=self.admin_site.name)
        for group in groups:
            redrive = running.get(group.fingerprint)
            yield {
                "group": group,
                "count": AtLeast(group.count) if group.is_capped else group.count,
                "first": elapsed(group.first_at, now),
                "last": elapsed(group.last_at, now),
                "chart": chart_of(group.by_hour),
                "tasks_url": f"{tasks}?status__exact=FAILED&fingerprint__exact={group.fingerprint}",
                "newest_url": self._task_url(group.newest),
                "redrive": redrive,
                "redrive_url": self._task_url(redrive.pk) if redrive else "",
            }

    def _task_url(self, id_: int) -> str:
        return reverse("admin:django_pglock_task_change", args=[id_], current_app=self.admin_site.name)

    # Verbs

    def _confirmation(
        self, request: HttpRequest, number: int, verb: str, task_path: str, exception_path: str
    ) -> HttpResponse:
        rows = in_group(Task.objects.using(router.db_for_write(Task)), number)
        context = {
            **question_of(self.verbs[verb], rows),
            "title": self.verbs[verb].button,
            "task_path": task_path,
            "exception_path": exception_path,
            "takes_rate": verb == "retry",
            "list_url": self.address("changelist"),
        }
        return self.answer(request, "failuregroup/confirm", context)

    def _redrive(self, request: HttpRequest, number: int) -> None:
        try:
            rate = float(request.POST["rate"])
            with transaction.atomic(using=router.db_for_write(Task)):
                made, is_new = enqueue_redrive(router.db_for_write(Task), number, rate)
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
        link = format_html('<a href="{}">#{}</a>', self._task_url(made), made)
        messages.info(request, format_html(text, rate=f"{rate:g}", link=link))


def chart_of(by_hour: tuple[int, ...]) -> str:
    """Return bars for the failures of the last hours as SVG, with the numbers as its title."""
    most = max(by_hour)
    # Rounded up, so that one failure among thousands can be seen.
    heights = [-(-count * HEIGHT // most) if most else 0 for count in by_hour]
    bars = [(STEP * hour, HEIGHT - height, BAR, height) for hour, height in enumerate(heights) if height]
    title = _("Failures in each of the last {hours} hours: {numbers}")
    return format_html(
        '<svg class="pglock-hours" role="img" viewBox="0 0 {} {}" preserveAspectRatio="none"><title>{}</title>{}</svg>',
        *(STEP * len(by_hour), HEIGHT, title.format(hours=len(by_hour), numbers=", ".join(map(str, by_hour)))),
        format_html_join("", '<rect x="{}" y="{}" width="{}" height="{}"/>', bars),
    )
