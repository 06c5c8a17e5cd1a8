"""The backend: its sessions come from a pool that lends objects of its own class, as that of SQLAlchemy does."""

from __future__ import annotations

from django.db.backends.postgresql import base


class Checkout:
    """A session on loan. ``close`` gives the session back and forgets it."""

    def __init__(self, idle, session):
        vars(self).update(idle=idle, driver_connection=session)

    def __getattr__(self, name):
        return getattr(self.driver_connection, name)

    def __setattr__(self, name, value):
        setattr(self.driver_connection, name, value)

    def close(self):
        if not self.driver_connection.closed:
            self.driver_connection.rollback()
            self.idle.append(self.driver_connection)
        vars(self)["driver_connection"] = None


class DatabaseWrapper(base.DatabaseWrapper):
    """A backend that takes its sessions from a pool of its own, as django-db-connection-pool's does."""

    idle = []

    def get_new_connection(self, conn_params):
        return Checkout(self.idle, self.idle.pop() if self.idle else super().get_new_connection(conn_params))
