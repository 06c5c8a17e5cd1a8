"""The overview: problems, queues, workers, and charts. The part that changes is also served as a fragment."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.apps.registry import Apps
from django.core.exceptions import PermissionDenied
from django.db import models
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.overview_attention import attention
from django_pglock.admin.overview_charts import charts_of, choice_of
from django_pglock.admin.overview_facts import Facts
from django_pglock.admin.overview_tables import queue_table, worker_table
from django_pglock.admin.pages import ReadOnlyAdmin
from django_pglock.models import AdvisoryLock, Lease, Queue, Schedule, Task, Worker

#: A user who may view one of these models may view the overview. Each section shows only data that the user may view.
VIEWED = (Task, Worker, Queue, Schedule, AdvisoryLock, Lease)


class Overview(models.Model):
    """The name under which admin sites list the overview. It has no table, and migrations do not know it.

    It is outside of the registry of models, as Django's own model of applied migrations is.
    """

    class Meta:
        """Where the admin shows it."""

        apps = Apps()
        app_label = "django_pglock"
        managed = False
        default_permissions = ()
        verbose_name = _("overview")
        verbose_name_plural = _("overview")

    def __str__(self) -> str:
        return str(self._meta.verbose_name)


class OverviewAdmin(ReadOnlyAdmin):
    """The page, and the fragment that the page loads every five seconds while it is visible."""

    class Media:
        """The script loads the fragment. Without it, a link loads the page again."""

        js = ("django_pglock/overview.js",)

    def get_urls(self) -> list[URLPattern]:
        """Return the page, under the name of a list so that the admin links to it, and the fragment."""
        site = self.admin_site
        return [
            path("", site.admin_view(self.page_view), name="django_pglock_overview_changelist"),
            path("now/", site.admin_view(self.fragment_view), name="django_pglock_overview_fragment"),
        ]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may view any of the pages of this package."""
        facts = Facts(request, self.admin_site)
        return any(facts.may_view(model) for model in VIEWED)

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return whether the index lists the page."""
        return self.has_view_permission(request)

    def page_view(self, request: HttpRequest) -> HttpResponse:
        """Show the page."""
        site = self.admin_site
        url = reverse("admin:django_pglock_overview_fragment", current_app=site.name)
        # The fragment has the query string of the page, because it must show the same.
        query = request.GET.urlencode()
        # Not "opts": themes ask them for the app's name, and the options of a model without registry have none.
        about = {"app_label": self.opts.app_label, "title": capfirst(self.opts.verbose_name), "media": self.media}
        about["app_name"] = apps.get_app_config(self.opts.app_label).verbose_name
        about["fragment_url"] = f"{url}?{query}" if query else url
        return self._answer(request, "page", {**site.each_context(request), **about})

    def fragment_view(self, request: HttpRequest) -> HttpResponse:
        """Answer with the part that changes."""
        return self._answer(request, "fragment", {})

    def _answer(self, request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            return HttpResponseNotAllowed(["GET", "HEAD"])
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        facts = Facts(request, self.admin_site)
        context["sentences"] = attention(facts)
        if facts.may_view(Task):
            queues = queue_table(facts)
            choice = choice_of(request, facts, [queue.name for queue in queues.rows])
            context |= {"queues": queues, "choice": choice, "charts": charts_of(facts, choice)}
        if facts.may_view(Worker):
            context["workers"] = worker_table(facts)
        return TemplateResponse(request, f"admin/django_pglock/overview/{template}.html", context)
