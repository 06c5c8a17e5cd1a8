"""Leases: locks in a row of a table, with an owner, an expiry and a fencing token."""
