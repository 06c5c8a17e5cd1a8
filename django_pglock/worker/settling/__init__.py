"""Settling: writing outcomes to the database, and reporting them to logs and signal receivers."""
