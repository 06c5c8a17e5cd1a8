"""Five systems built with the library, a page of code each: ``python3 manage.py systems NAME`` runs one.

Each package has a docstring that tells its problem, ``models.py`` and the other files that a user would write, and
``scenario.py``, which is not part of the system: it runs the system with real processes and asks the database for
evidence.
"""

#: The packages of this folder, in the order in which one would read them.
NAMES = ("mutex", "checkout", "handoff", "ledger", "sharing")
