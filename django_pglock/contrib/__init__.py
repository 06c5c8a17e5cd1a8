"""Adapters to other packages. Nothing here is imported unless you do."""
