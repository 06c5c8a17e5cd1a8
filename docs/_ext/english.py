"""Check the English of the pages, of the package, of the example project, of the tests and of the benchmarks.

In the package and in the example project it reads messages, docstrings and comments. In tests/, bench/ and docs/_ext/
it reads docstrings and comments only: the other strings there are data. In the code blocks of a page it reads comments
and docstrings as well, and the titles of directives.

Run: ``python docs/_ext/english.py``. It needs proselint, prints one line for each phrase to rewrite, and exits with 1
if there is one. CONTRIBUTING.md has the rules; ``SAY_INSTEAD`` has the phrases that break them most often.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from proselint.config import Config
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, types
from proselint.tools import LintFile

ROOT = Path(__file__).parents[2]
#: A phrase, as a regular expression in which a space is any white space, and what to write instead.
SAY_INSTEAD = {
    "prevents? that": "prevents … from …, keeps … from …",
    "know (?:two|three|four|these) things": "the first thing",
    "whoever": "who: the worker, the holder, the caller",
    "go(?:es)? on": "continues, or the verb of what happens",
    "went on": "continued",
    "going on": "continuing, or the verb of what happens",
    "shall": "must, or the plain verb",
    "left alone": "not changed, not cancelled, not counted …",
    "leaves? alone": "does not change",
    "signs? of life": "heartbeat, answer",
    "told of": "who calls, notifies or reports to whom",
    "hears? of": "receives, is notified of",
    "nobody hears": "without receivers",
    "nobody (?:can|could) mean": "invalid",
    "what (?:cannot|may not) be": "the thing that is invalid",
    "(?:of|like|from|than|by|and|or|beside|for|as|if|then|only|with|to|but) ones? (?:that|who)": "the noun again",
    "comes? to its end": "ends",
    "(?:has|have) a look": "checks",
    "looks? after": "checks, restarts …",
    "in hand": "prefetched, or running",
    "puts? off": "postpones",
    "under way": "running, in flight",
    "on its way": "sent, in flight",
    "hangs? up": "closes the connection",
    "(?:is|are|was) away": "cannot be reached",
    "lets? in": "allows",
    "to be had": "available",
    "carried along": "copied, stored with",
    "keeps? (?:nobody|everybody) out": "excludes",
    "stands? in the record": "is in the row",
    "of which nobody": "two sentences",
    "nobody (?:knows|notices|rescues|asleep|needs|uses)": "no worker, no user, or the passive voice",
    "nobody (?:corrects|can find)": "the passive voice, or the subject",
    "(?:asks|tells|stays with) nobody": "sends no statement, notifies no worker, has no holder",
    "if somebody": "if a user, if another transaction",
    "the same, as": "as: …",
    "(?:by|with|than) nobody": "no session, no worker, no user",
    "somebody else": "another session, another user",
    "nobody (?:will|waits|sleeps|slept)": "no worker, no session",
    "mend": "correct",
    "sees? to it that": "ensures that",
    "hardly ever": "rarely, seldom",
    "(?:that|which) (?:cannot|could not) be meant": "invalid",
    "puts? (?:it|the \\w+) off": "postpones",
    "sign(?:ed|s) off": "ended in order",
    "most retries": "maximum number of retries",
    "so many times": "multiplies by this factor, after this multiple of …",
    "elders?": "older workers",
    "eldest": "oldest",
    "(?:two|each|last|prompt) looks?": "poll, check, query, probe",
    "prompt (?:ones?|workers?)": "the workers woken first",
    "nobody (?:was|is) told": "not notified",
    "the alarm": "the column, the timer",
    "(?:a|an|each|every|first|last|next|second|at|of) tr(?:y|ies)": "attempt",
    "(?:two|three|more|most|some|between|after) tries": "attempts",
    "(?:has|have|there is) (?:no )?room": "free capacity, space",
    "crews?": "the workers",
    "blows?": "fault",
    "two hands|(?:its|their|our|his|her) hands": "in flight, held, claimed",
}
#: Checks of proselint that fit technical English.
FITTING = (
    "archaism",
    "cliches",
    "malapropisms",
    "mixed_metaphors",
    "mondegreens",
    "needless_variants",
    "nonwords",
    "oxymorons",
    "redundancy",
    "skunked_terms",
    "spelling",
)
#: The folders whose messages are read, and those in which strings that are no docstrings are data.
MESSAGES = ("django_pglock", "example_project")
DATA = ("tests", "qa", "bench", "docs/_ext")
#: Folders that are not read: migrations do not change any more.
NOT_READ = {"migrations"}
OURS = "pglock"
CONFIG: Config = {"max_errors": 1000, "checks": dict.fromkeys((*FITTING, OURS), True)}
#: A block of code or a directive in a page.
BLOCK = re.compile(r"^ *(`{3,}|:{3,})(.*)\n((?:.*\n)*?) *\1", re.MULTILINE)
#: What is English in it: the title of a directive, the comments of SQL, and the comments and docstrings of other code.
TITLE = re.compile(r"(?<=\}) .+")
IN_SQL = re.compile(r"(?<=-- ).+$", re.MULTILINE)
IN_CODE = re.compile(r"(?:(?<=^# )|(?<= # )|(?<=^#: )|(?<= #: )).+$|(?<=\"{3})[^\"]+(?=\"{3})", re.MULTILINE)
#: What is no English in the rest of a page: code, comments, addresses.
CODE = re.compile(r"`[^`]+`|<!--.*?-->|\]\([^)]*\)|https?://\S+", re.DOTALL)
#: The marks of quotations and of emphasis, which may be between the words of a phrase.
MARKS = re.compile(r"^[ >]*>|(?<!\w)[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}(?!\w)", re.MULTILINE)
#: What is no English in a string: fields, and the quotes between its parts.
FIELDS = re.compile(r"\{[^{}]*\}|``[^`]*``|[\"']\s*\n\s*[rfb]{0,2}[\"']|\\n")
#: proselint skips quotations, and every message is one.
QUOTES = re.compile(r"[\"“”„]|(?<!\w)'|'(?!\w)")
#: Spaces in a line: two of them are as little the space between two words of a phrase as more are.
WIDE = re.compile(r" {3,}")
SQL = re.compile(r"\b(?:SELECT|UPDATE|INSERT|DELETE|WITH|FROM|WHERE|VALUES|JOIN|RETURNING|CREATE)\b")


def pages() -> list[Path]:
    """Return the pages that people read."""
    return [
        *sorted(ROOT.glob("*.md")),
        *(page for name in ("docs", "qa") for page in sorted((ROOT / name).rglob("*.md"))),
    ]


def sources() -> list[Path]:
    """Return the Python files whose messages, docstrings and comments people read."""
    paths = [path for folder in (*MESSAGES, *DATA) for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in paths if not NOT_READ.intersection(path.relative_to(ROOT).parts)]


def prose_of_page(text: str) -> str:
    """Return the page with blanks instead of code. The rest stays at its place."""
    return MARKS.sub(lambda mark: _spaces(mark[0]), CODE.sub(_blank, BLOCK.sub(_prose_of_block, text)))


def prose_of_source(text: str, *, with_messages: bool = True) -> str:
    """Return the comments, the docstrings and the messages at their places, and blanks instead of code."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    prose = list(re.sub(r"[^\n]", " ", text))
    for start, end in (*_comments(text, starts), *_strings(text, lines, starts, with_messages=with_messages)):
        prose[start:end] = FIELDS.sub(_blank, text[start:end])
    return "".join(prose)


def findings(path: Path) -> Iterator[str]:
    """Yield what is to be rewritten in a file, one line each."""
    text = path.read_text()
    has_messages = not any(path.is_relative_to(ROOT / folder) for folder in DATA)
    prose = prose_of_page(text) if path.suffix == ".md" else prose_of_source(text, with_messages=has_messages)
    if not prose.strip():
        return
    # Only the lines of the findings are used, and most of a source is blank.
    prose = WIDE.sub("  ", QUOTES.sub(" ", prose))
    for found in LintFile(str(path), prose).lint(CONFIG):
        yield f"{path}:{found.pos[0]}: {found.check_result.message}"


def register() -> None:
    """Add our checks and those of proselint to its registry, once in a process."""
    from proselint.checks import __register__ as theirs

    registry = CheckRegistry()
    if not registry.checks:
        # Only these, because proselint compares the path of each registered check with CONFIG for each file.
        registry.register_many(tuple(each for each in theirs if each.path.partition(".")[0] in FITTING))
        phrases = {phrase.replace(" ", r"\s+"): instead for phrase, instead in SAY_INSTEAD.items()}
        registry.register(Check(types.PreferredForms(phrases), path=OURS, message="{1!r}: write {0}."))


def main(paths: Iterable[Path]) -> int:
    """Print the findings in these files and return the exit code."""
    register()
    found = [finding for path in paths for finding in findings(path)]
    sys.stdout.write("\n".join(found or ["English: nothing to rewrite."]) + "\n")
    return 1 if found else 0


def _blank(match: re.Match[str]) -> str:
    # No spaces: words before and after code would look like neighbours.
    return re.sub(r"[^\n]", "`", match[0]) if "\n" not in match[0] or match[0].startswith("`") else _spaces(match[0])


def _prose_of_block(block: re.Match[str]) -> str:
    text, language = block[0], block[2].strip()
    english = TITLE if language.startswith("{") else IN_SQL if language == "sql" else IN_CODE
    # No spaces, as in ``_blank``, and no backticks, because the prose between two of them would look like code.
    prose = list(re.sub(r"[^\n]", "~", text))
    for found in english.finditer(text):
        prose[found.start() : found.end()] = found[0]
    return "".join(prose)


def _spaces(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node. Most nodes of a file are expressions, which this leaves out."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(node, name, None)
        # The body of a lambda is an expression.
        for each in inner if isinstance(inner, list) else ():
            yield each
            yield from _statements(each)


def _comments(text: str, starts: list[int]) -> Iterator[tuple[int, int]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            start = starts[token.start[0] - 1] + token.start[1]
            yield start + len(token.string) - len(token.string.lstrip("#: ")), start + len(token.string)


def _strings(text: str, lines: list[str], starts: list[int], *, with_messages: bool) -> Iterator[tuple[int, int]]:
    def place(line: int, column: int) -> int:
        # The columns of ast count bytes.
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    tree = ast.parse(text)
    expressions = [node.value for node in _statements(tree) if isinstance(node, ast.Expr)]
    docstrings = set(map(id, expressions))
    inside: set[int] = set()
    for node in ast.walk(tree) if with_messages else expressions:
        if id(node) in inside or not isinstance(node, (ast.Constant, ast.JoinedStr)):
            continue
        if isinstance(node, ast.JoinedStr):
            inside.update(map(id, ast.walk(node)))
        start, end = place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)
        # A docstring may name UPDATE and is English nevertheless.
        is_english = id(node) in docstrings or (with_messages and not SQL.search(text[start:end]))
        if isinstance(getattr(node, "value", ""), str) and " " in text[start:end] and is_english:
            yield start, end


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]] or [*pages(), *sources()]))
