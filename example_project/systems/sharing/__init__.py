"""Sharing: rows of a table, processed by any number of instances in equal shares."""
