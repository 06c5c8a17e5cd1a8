"""The words that people search for lead to the right page, in the built search index.

``<!-- index: dead letter, failed tasks -->`` in a page makes index entries for the section below it. The search shows
them before what it finds in texts. After the build, each of ``SEARCHES`` has to have its page first: in the order of
Sphinx's own ``searchtools.js``, without parts of words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish
from sphinx.util import logging

logger = logging.getLogger(__name__)
#: What people type, and the page that answers it.
SEARCHES = {
    "dead letter": "retries",
    "429": "limits",
    "pytest": "testing",
    "retry": "retries",
    "workflow": "workflows",
    "delay": "tasks",
    "duplicate": "unique",
    "celery": "coming_from",
    "deploy": "worker",
    "slow": "admin",
    "stuck": "admin",
    "cron": "schedules",
    "chord": "workflows",
    "countdown": "tasks",
    "double click": "locks",
    "idempotency": "locks",
}
#: Scores of searchtools.js: an object of Python, a word of a title, and one of a text.
OBJECT, TITLE, TERM = 16, 15, 5
#: Scores with the numbers of pages.
Results = Iterator[tuple[int, int]]
INDEX = re.compile(r"^<!-- index: (.+) -->$", re.MULTILINE)


def mark(app: Any, docname: str, source: list[str]) -> None:
    """Make the directive of an index entry of each comment. GitHub shows a comment to nobody."""
    source[0] = INDEX.sub(
        lambda found: "\n".join(f"```{{index}} ! {word.strip()}\n```" for word in found[1].split(",")), source[0]
    )


def first_page(index: dict[str, Any], query: str) -> str:
    """Return the name of the page that the search shows first, or an empty string."""
    results = [
        *_in_titles(index, query),
        *_in_entries(index, query),
        *_in_objects(index, query),
        *_in_texts(index, query),
    ]
    _, first = max(results, key=lambda result: result[0], default=(0, None))
    return "" if first is None else str(index["docnames"][first])


def _in_titles(index: dict[str, Any], query: str) -> Results:
    for title, places in index["alltitles"].items():
        if query in title.lower() and len(query) >= len(title) / 2:
            for page, _ in places:
                yield round(TITLE * len(query) / len(title)) + (index["titles"][page] == title), page


def _in_entries(index: dict[str, Any], query: str) -> Results:
    for entry, places in index["indexentries"].items():
        if query in entry and len(query) >= len(entry) / 2:
            for page, _, is_main in places:
                yield round(100 * len(query) / len(entry)) if is_main else 0, page


def _in_objects(index: dict[str, Any], query: str) -> Results:
    for objects in index["objects"].values():
        for page, _, _, _, name in objects:
            if query == name.lower():
                yield OBJECT, page


def _in_texts(index: dict[str, Any], query: str) -> Results:
    stems = [SearchEnglish({}).stem(word) for word in query.split() if not word.isdigit()]
    for page in range(len(index["docnames"])):
        scores = [_score(index, stem, page) for stem in stems]
        if scores and all(scores):
            yield max(scores), page


def _score(index: dict[str, Any], stem: str, page: int) -> int:
    for kind, score in (("titleterms", TITLE), ("terms", TERM)):
        pages = index[kind].get(stem, [])
        if page in (pages if isinstance(pages, list) else [pages]):
            return score
    return 0


def check(app: Any, error: Exception | None) -> None:
    """Warn of each search that shows another page first."""
    file = Path(app.outdir) / "searchindex.js"
    if error or app.builder.name != "html":
        return
    index = json.loads(file.read_text()[len("Search.setIndex(") : -1])
    for query, page in SEARCHES.items():
        if (shown := first_page(index, query)) != page:
            logger.warning("The search for %r shows %r first, and not %r.", query, shown, page)


def setup(app: Any) -> dict[str, Any]:
    """Connect both steps."""
    app.connect("source-read", mark)
    app.connect("build-finished", check)
    return {"parallel_read_safe": True}
