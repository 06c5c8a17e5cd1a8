"""The locks room: advisory locks by name, for code and for views.

This file imports nothing, so that who needs one module here does not load all of them: a worker needs few. The package
itself, ``django_pglock``, has the public names.
"""
