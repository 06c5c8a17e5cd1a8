"""Upkeep: what one of all workers does from time to time for the whole database."""
