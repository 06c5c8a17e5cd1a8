"""The token buckets of rate limits."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.dumping import DumpedManager
from django_pglock.models.requirements import OnPostgreSQL


class RateLimit(models.Model):
    """The token bucket of one key. The generic cell rate algorithm stores one date (ITU-T I.371, "virtual scheduling").

    ``arrives_at`` is the theoretical arrival time of the next token; ``opens_at`` is set while tasks wait for a token.
    """

    key = models.CharField(_("key"), max_length=512, primary_key=True)
    arrives_at = models.DateTimeField(_("next token at"))
    opens_at = models.DateTimeField(_("tasks wait until"), null=True)

    for_dumpdata = DumpedManager()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("rate limit")
        verbose_name_plural = _("rate limits")
        default_permissions = ("view",)
        indexes = [
            models.Index(fields=["opens_at"], name="pglock_rate_opens", condition=models.Q(opens_at__isnull=False))
        ]

    def __str__(self) -> str:
        return self.key

    def __repr__(self) -> str:
        return f"<RateLimit {self.key!r}>"
