"""The Django project of the contestants that are Django apps; all of them run the very same functions."""
