"""Advisory locks by name, for code and for views.

This file imports nothing, so that code that needs one module does not load all of them. A worker needs only few. The
public names are in the package ``django_pglock``.
"""
