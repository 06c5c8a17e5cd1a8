"""Adapters for other packages. A project imports the module that it needs; the package imports none of them."""
