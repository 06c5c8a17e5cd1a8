"""Leases: locks that live in a row, with an owner, an end and a fencing token."""
