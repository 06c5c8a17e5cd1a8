"""With a standby as the default database, the locks of views are on the primary."""

from __future__ import annotations

from qa.web.cases import on_servers
from qa.web.observer import Observer


@on_servers(["standby"])
def test_the_lock_of_a_view_is_taken_on_the_primary_only(visit, site):
    visit = visit()
    click = visit.click("plain", "stop=view")
    visit.wait_at("view")
    standby = Observer(site.databases.environment["DATABASE_URL"])
    try:
        assert (visit.observer.locks(visit.lock), standby.locks(visit.lock)) == (1, 0)
    finally:
        standby.close()
    visit.open()
    assert click.answer().status == 200
    visit.expect_free()
