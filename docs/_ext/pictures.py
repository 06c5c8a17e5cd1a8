"""Makes all pictures of README and docs: ``python docs/_ext/pictures.py [NAME ...]``.

``rooms`` is drawn from the code, ``demo`` and the names of the systems from what their commands write on a terminal,
and ``admin`` is photographed in a headless Chromium. Without names all are made. A picture of a command is written only
if all of its claims hold. Needs the extras ``docs`` and ``demo``, Chromium, and Linux or macOS.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "_static" / "systems"
#: Letters in a line of the terminal. All pictures have the same, so their letters are of one size in the pages.
WIDTH = 110


def main(*names: str) -> None:
    """Make the pictures with these names, or all of them. Ends with an error if a claim does not hold."""
    sys.path.insert(0, str(ROOT))
    import admin_pictures
    import rooms

    from example_project.systems import NAMES

    PICTURES.mkdir(exist_ok=True)
    for name in names or ("rooms", *NAMES, "demo", "admin"):
        if name == "rooms":
            rooms.PICTURE.write_text(rooms.picture())
        elif name == "admin":
            admin_pictures.take()
        elif name == "demo":
            draw("demo", "--no-serve", to=PICTURES.parent / "demo.svg")
        else:
            draw("systems", name, to=PICTURES / f"{name}.svg")


def draw(*arguments: str, to: Path) -> None:
    """Draw what ``manage.py`` writes with these arguments."""
    command = " ".join(("python3 manage.py", *arguments))
    to.write_text(drawn(f"$ {command}\n{run(*arguments)}", title=command, name=to.stem))


def run(*arguments: str) -> str:
    """Run a command on a terminal of its own, so that it writes in colours; return what it wrote."""
    terminal, inside = pty.openpty()
    command = [sys.executable, str(ROOT / "manage.py"), *arguments]
    environment = {**os.environ, "COLUMNS": str(WIDTH)}
    with subprocess.Popen(command, stdout=inside, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment) as process:
        os.close(inside)
        with io.FileIO(terminal) as screen:
            written = b"".join(iter(lambda: chunk(screen), b""))
    if process.returncode:
        sys.exit(f"manage.py {' '.join(arguments)} ended with {process.returncode}.")
    lines = written.decode().replace("\r\n", "\n").split("\n")
    # A line that is written again and again, such as a bar, is shown as it was in the end.
    return "\n".join(line.rpartition("\r")[2] for line in lines)


def chunk(screen: io.FileIO) -> bytes:
    """Return what is written next, and nothing at the end. Linux reports the end of a terminal as an error."""
    try:
        return screen.read(4096)
    except OSError:
        return b""


def drawn(output: str, *, title: str, name: str) -> str:
    """Draw the output of a command, with its colours."""
    text = Text.from_ansi(output.rstrip())
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(text)
    picture = console.export_svg(title=title, unique_id=name)
    # The pages of the documentation load nothing from elsewhere.
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


if __name__ == "__main__":
    main(*sys.argv[1:])
