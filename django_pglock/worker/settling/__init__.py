"""Settling: writes outcomes to the database, and reports them to logs and signal receivers."""
