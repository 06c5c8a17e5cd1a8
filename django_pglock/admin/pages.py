"""The common base of our admin pages: counts stop at 10,000 rows, and pages are read-only by default.

Actions and buttons apply one verb each, show a message and write to the admin log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from django.apps import apps as django_apps
from django.apps.registry import Apps
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import get_fields_from_path, quote, unquote
from django.contrib.admin.views.main import ChangeList
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import router, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timesince import timesince
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from django_pglock.errors import ConfigurationError
from django_pglock.store.bulk import enqueue_change
from django_pglock.store.dependants import Related
from django_pglock.store.operate import Verb
from django_pglock.store.statements import MOST_COUNTED, WINDOW

#: A log entry lists the ids of at most this number of tasks.
MOST_NAMED = 100


#: A moment with its seconds and its time zone, for Python and for templates.
SECONDS = "%Y-%m-%d %H:%M:%S %Z"


def elapsed(since: Any, now: datetime | None = None) -> str:
    """Return the time since a moment: in seconds below two minutes, from then on as Django's ``timesince``.

    ``now`` is the server's time, if it is known; else the host's clock is used.
    """
    now = now or timezone.now()
    seconds = (now - since).total_seconds()
    return _("%(seconds).0f s") % {"seconds": max(seconds, 0)} if seconds < 120 else timesince(since, now)


def mark(status: str, text: Any) -> str:
    """Return a word as a status is shown, in the colour of the task status of this name."""
    return format_html('<span class="pglock-status pglock-{}">{}</span>', status, text)


def needs(permission: str) -> Callable[..., bool]:
    """Return the method of an admin that says whether a user has a permission. Django finds the method by its name."""
    return lambda self, request, obj=None: bool(request.user.has_perm(f"django_pglock.{permission}"))


def never(model_admin: Any, request: HttpRequest, obj: Any = None) -> bool:
    """Return False: no user may do this."""
    return False


class PageOnly:
    """The options of a model that has no table, only a page: a name under which admin sites list the page.

    It is outside of the registry of models, as Django's own model of applied migrations is. So no migration knows it.
    """

    apps = Apps()
    # Templates of the admin and of its themes ask for the name of the app.
    apps.app_configs = django_apps.app_configs
    app_label = "django_pglock"
    managed = False
    default_permissions = ()


def record(request: HttpRequest, model: Any, text: str, *, object_id: str | None = None, flag: int = CHANGE) -> None:
    """Write one entry to the admin log, for any number of rows."""
    LogEntry.objects.create(
        user_id=request.user.pk or 0,
        content_type=ContentType.objects.get_for_model(model, for_concrete_model=False),
        object_id=object_id,
        object_repr=text[:200],
        action_flag=flag,
        change_message=text,
    )


def value_of(request: HttpRequest) -> str:
    """Return the value that a user has typed for a verb."""
    # PostgreSQL cannot store a NUL character in text.
    return request.POST.get("value", "").strip().replace("\x00", "")


def admin_action(verb: Verb) -> Callable[..., HttpResponse | None]:
    """Return the verb as an action of a list page."""

    def action(model_admin: Any, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        # Without statuses it is not a verb of tasks: the rows are few, and change back as easily.
        is_across_pages = request.POST.get("select_across") == "1" and verb.statuses
        is_asked = is_across_pages or verb.takes_queue or verb.related(queryset.order_by()).ids
        if is_asked and "confirmed" not in request.POST:
            answer: HttpResponse = model_admin.question(request, verb, queryset)
            return answer
        try:
            verb.check(router.db_for_write(queryset.model), value_of(request))
        except ValueError as error:
            messages.error(request, str(error))
            return None
        model_admin.perform(verb, request, queryset, value_of(request))
        return None

    action.__name__ = verb.name
    return admin.action(description=verb.label, permissions=[verb.permission])(action)


class AtLeast(int):
    """A count that stopped early. Compares and paginates as a number; Django's templates print it as "10000+"."""

    def __str__(self) -> str:
        # With USE_THOUSAND_SEPARATOR Django would take a "+" behind the digits for a digit.
        return f">{int(self)}" if settings.USE_THOUSAND_SEPARATOR else f"{int(self)}+"


def capped(count: int, most: int) -> int:
    """Return a count, for which up to ``most`` + 1 rows were counted; if there are more than ``most``, ``AtLeast``."""
    return AtLeast(most) if count > most else count


# Django's classes are generic only for type checkers.
class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts up to ``MOST_COUNTED`` rows and stops."""

    @cached_property
    def count(self) -> int:
        """The number of rows; if there are more than ``MOST_COUNTED``, that number as ``AtLeast``."""
        rows: Any = self.object_list
        # In the order of the list, so that the count reads the same index and rows as the list.
        found: int = rows.values("pk")[: MOST_COUNTED + 1].count()
        return capped(found, MOST_COUNTED)


class CappedChangeList(ChangeList):
    """Knows whether there are more rows than were counted, and sorts only by columns that the page offers."""

    @property
    def is_capped(self) -> bool:
        """Whether there are more rows than were counted."""
        return isinstance(self.paginator.count, AtLeast)

    def get_results(self, request: HttpRequest) -> None:
        """Find the rows of the page, and leave out columns that tell nothing of them."""
        self.find_rows(request)
        self.result_list: Any = list(self.result_list)
        self.list_display = [each for each in self.list_display if self._tells_something(each)]

    def find_rows(self, request: HttpRequest) -> None:
        """Find the rows of the page."""
        super().get_results(request)

    def _tells_something(self, column: Any) -> bool:
        # Type checkers know only the admin of Django.
        model_admin: Any = self.model_admin
        if column not in model_admin.left_out_if_equal or len(self.result_list) < 2:
            return True
        return any(getattr(row, column) != getattr(self.result_list[0], column) for row in self.result_list)

    def get_queryset(self, request: HttpRequest, *arguments: Any, **options: Any) -> Any:
        """Refuse values that cannot be read."""
        try:
            return super().get_queryset(request, *arguments, **options)
        except (ValueError, OverflowError) as error:  # also for a moment at the end of the calendar
            raise IncorrectLookupParameters from error

    def get_ordering_field(self, field_name: Any) -> Any:
        """Return None for a column that ``sortable_by`` does not list, although the query string names it: no index."""
        return super().get_ordering_field(field_name) if field_name in (self.sortable_by or ()) else None


class OneChoiceFilter(admin.SimpleListFilter):
    """A filter with one choice, which keeps the rows that a method of the queryset returns."""

    #: The value of the choice in the query string, and its label.
    choice: tuple[str, Any]
    #: The name of the method.
    method: str

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Return the only choice."""
        return [self.choice]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Return the rows of the choice if it is selected, else all."""
        return getattr(queryset, self.method)() if self.value() == self.choice[0] else queryset


def filter_of(base: Any, parameter: str, title: Any, **attributes: Any) -> Any:
    """Return a filter of a list: a class with these attributes. Functions do not become methods."""
    values = {name: staticmethod(each) if callable(each) else each for name, each in attributes.items()}
    return type(f"{parameter.title()}Filter", (base,), {"parameter_name": parameter, "title": title, **values})


one_choice = partial(filter_of, OneChoiceFilter)


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """A list page and a row page without editable fields. Actions and buttons change rows by guarded verbs."""

    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 100
    list_max_show_all = 100
    paginator = CappedPaginator
    change_list: type[ChangeList] = CappedChangeList
    #: Columns that a page without differences leaves out, so that the rest fits the screen.
    left_out_if_equal: tuple[str, ...] = ()
    #: Lookups in the links of our own templates. Those of ``list_filter`` are added.
    linked_lookups: tuple[str, ...] = ()
    #: What users may do with rows, by name: the actions of the list, and the buttons of the page of a row.
    verbs: ClassVar[Mapping[str, Verb]] = {}

    class Media:
        """One stylesheet, no inline style and no script: the pages work under a strict Content Security Policy."""

        css = {"all": ["django_pglock/admin.css"]}

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return our change list."""
        return self.change_list

    def own_path(self, route: str, page: str, view: Any, *methods: str) -> URLPattern:
        """Return the URL of a page of ours, which takes these methods; without any, GET and HEAD."""
        checked = require_http_methods(methods or ["GET", "HEAD"])(self.admin_site.admin_view(view))
        url: URLPattern = path(route, checked, name=f"{self.opts.app_label}_{self.opts.model_name}_{page}")
        return url

    def address(self, page: str, *arguments: Any, model: str = "") -> str:
        """Return the address of a page of this model or of another one, such as ``changelist``, on this admin site."""
        name = f"admin:{self.opts.app_label}_{model or self.opts.model_name}_{page}"
        return reverse(name, args=arguments, current_app=self.admin_site.name)

    def link_to_task(self, key: Any) -> SafeString:
        """Return a link to the page of a task: its number."""
        return format_html('<a href="{}">#{}</a>', self.address("change", key, model="task"), key)

    def answer(self, request: Any, template: str, context: dict[str, Any]) -> HttpResponse:
        """Return a page of ours, by the name of its template."""
        request.current_app = self.admin_site.name
        about = {**self.admin_site.each_context(request), "opts": self.opts, "media": self.media}
        return TemplateResponse(request, f"admin/django_pglock/{template}.html", {**about, **context})

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Return whether the list serves a lookup: those of filters and links, each at most once in the query string.

        Django serves any lookup on the fields of a model. With ``?kwargs__email__startswith=u`` a user who may only
        view tasks could guess a redacted argument. So the answer to all others is 400, without a query.
        """
        if len(request.GET.getlist(lookup)) > 1:
            return False
        served = {name for each in self.get_list_filter(request) for name in self._names_of(each, request)}
        return lookup in served.union(self.linked_lookups)

    def _names_of(self, list_filter: Any, request: HttpRequest) -> list[Any]:
        """Return the parameters of one item of ``list_filter``."""
        if callable(list_filter):
            return [getattr(list_filter, "parameter_name", None)]
        name, make = list_filter if isinstance(list_filter, tuple) else (list_filter, admin.FieldListFilter.create)
        field: Any = get_fields_from_path(self.model, name)[-1]
        names: Any = make(field, request, {}, self.model, self, field_path=name).expected_parameters()
        return [each for each in names if field.null or not each.endswith("__isnull")]

    def seen(self, request: HttpRequest, object_id: str) -> Any:
        """Return a row that the user may view. Raises ``PermissionDenied``, or ``Http404`` if there is no such row."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = self.get_object(request, object_id)
        if row is None:
            raise Http404
        if not self.has_view_permission(request, row):
            raise PermissionDenied
        return row

    # Verbs

    def may(self, request: HttpRequest, verb: Verb) -> bool:
        """Return whether the user may apply a verb."""
        return bool(getattr(self, f"has_{verb.permission}_permission")(request))

    def verbs_of(self, row: Any) -> Iterable[Verb]:
        """Return the verbs that have a button on the page of this row."""
        return ()

    def verb_view(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Apply the verb of a button: only by POST, with CSRF protection, and with the permission of the verb."""
        found = self.verbs.get(verb)
        if found is None or not found.button or not self.may(request, found):
            raise PermissionDenied
        # A user may act only on rows that the admin shows to that user.
        rows = self.get_queryset(request).filter(pk=self.seen(request, unquote(object_id)).pk)
        if (found.is_deletion or found.related(rows.order_by()).ids) and "confirmed" not in request.POST:
            return self.question(request, found, rows)
        self.perform(found, request, rows, value_of(request))
        if found.is_deletion:
            return HttpResponseRedirect(self.address("changelist"))
        return HttpResponseRedirect(self.address("change", object_id))

    def perform(self, verb: Verb, request: HttpRequest, rows: Any, value: str) -> None:
        """Apply the verb to the rows, show a message and write a log entry.

        More rows than ``WINDOW`` are changed by a task, because a request may not take that long.
        """
        # The admin passes a queryset in display order, possibly on a replica. The verb needs an unordered one on the
        # database that takes writes.
        chosen = rows.using(router.db_for_write(rows.model)).order_by()
        asked = list(chosen.order_by("-pk").values_list("pk", flat=True)[: WINDOW + 1])
        name = f"{verb.name} {value}".strip()
        with transaction.atomic(using=chosen.db):
            if len(asked) > WINDOW:
                self._perform_by_task(verb, request, chosen, value, name)
                return
            related = self.related_to(verb, request, chosen)
            count = verb.apply(chosen, value, related.ids) if asked else 0
            some = f" of {', '.join(f'#{key}' for key in sorted(asked))}" if 1 < len(asked) <= MOST_NAMED else ""
            # With an object id the entry also appears in the history of that task.
            record(request, rows.model, f"{name}: {count}{some}", object_id=str(asked[0]) if len(asked) == 1 else None)
        if count:
            messages.success(request, verb.message(verb.done, count))
            if related.remark:
                messages.warning(request, related.remark)
        if (left := len(asked) + len(related.ids) - count) > 0:
            messages.warning(request, verb.message(verb.unchanged, left))
        elif not asked:
            messages.warning(request, _("The selected rows no longer exist."))

    def _perform_by_task(self, verb: Verb, request: HttpRequest, chosen: Any, value: str, name: str) -> None:
        ids = [*verb.ids(chosen, value), *self.related_to(verb, request, chosen).ids]
        try:
            made = enqueue_change(chosen.db, verb, ids, value)
        except ConfigurationError as error:
            messages.error(request, str(error))
            return
        numbers = ", ".join(f"#{each}" for each in made)
        record(request, chosen.model, f"{name}: asked for {len(ids)} tasks, to be changed by {numbers}")
        if not made:
            messages.warning(request, verb.message(verb.unchanged, WINDOW + 1, most=WINDOW))
        text = _("A worker does this in the background, for {count} tasks. Progress, and a button to cancel: {link}")
        for each in made:
            messages.info(request, format_html(text, count=len(ids), link=self.link_to_task(each)))

    def related_to(self, verb: Verb, request: HttpRequest, rows: Any) -> Related:
        """Return the other tasks that the user has chosen to change as well, and what to say of those that stay."""
        found = verb.related(rows)
        return found if "related" in request.POST else found._replace(ids=())

    def question(self, request: HttpRequest, verb: Verb, rows: Any, **context: Any) -> HttpResponse:
        """Ask for confirmation before a verb changes these rows, and show how many it would change."""
        names = ("action", "select_across", "index", ACTION_CHECKBOX_NAME)
        rows = rows.order_by()
        count, related = verb.movable(rows).count(), verb.related(rows)
        about = {
            "title": verb.button or verb.label,
            "question": verb.message(verb.question, count),
            "remark": related.remark,
            "offer": verb.offer if related.ids else None,
            "offered": verb.message(verb.offer.text, len(related.ids)) if verb.offer else "",
            "exceeds_window": count > WINDOW,
            "value_label": _("Queue") if verb.takes_queue else "",
            "back": f"{self.address('changelist')}?{request.GET.urlencode()}",
            "fields": [(name, value) for name in names for value in request.POST.getlist(name)],
        }
        return self.answer(request, "confirm", {**about, **context})

    # The page of a row

    def get_urls(self) -> list[URLPattern]:
        """Add the URL of the buttons."""
        return [self.own_path("<path:object_id>/do/<str:verb>/", "verb", self.verb_view, "POST"), *super().get_urls()]

    def render_change_form(self, request: HttpRequest, context: Any, *arguments: Any, **options: Any) -> Any:
        """Add the buttons that the user may press, and the values of ``context_of``."""
        row = options.get("obj")
        if row is not None:
            verbs = [verb for verb in self.verbs_of(row) if self.may(request, verb)]
            buttons = [(verb, self.address("verb", quote(row.pk), verb.name)) for verb in verbs]
            context = {**context, "pglock_buttons": buttons, **self.context_of(request, row)}
        return super().render_change_form(request, context, *arguments, **options)

    def context_of(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Return the additional parts of a row's page."""
        return {}

    # ``enqueue``, workers and PostgreSQL create the rows, no field is editable, and a row may be in use. Actions have
    # permissions of their own.
    has_add_permission = has_change_permission = has_delete_permission = never
