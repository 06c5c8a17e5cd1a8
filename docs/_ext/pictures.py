"""Draws the output of ``manage.py systems NAME`` as SVG: ``python docs/_ext/pictures.py [NAME ...]``.

Without names it draws all. It runs each system as a user would, and writes ``docs/_static/systems/NAME.svg`` if the
claims of the system hold. Needs the extra ``docs``, and Linux or macOS.
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
    """Draw the systems with these names, or all of them. Ends with an error if a claim does not hold."""
    sys.path.insert(0, str(ROOT))
    from example_project.systems import NAMES

    PICTURES.mkdir(exist_ok=True)
    for name in names or NAMES:
        command = f"python3 manage.py systems {name}"
        output = run(name)
        (PICTURES / f"{name}.svg").write_text(drawn(f"$ {command}\n{output}", title=command, name=name))


def run(name: str) -> str:
    """Run a system on a terminal of its own, so that it writes in colours; return what it wrote."""
    terminal, inside = pty.openpty()
    command = [sys.executable, str(ROOT / "manage.py"), "systems", name]
    with subprocess.Popen(command, stdout=inside, stdin=subprocess.DEVNULL, cwd=ROOT) as process:
        os.close(inside)
        with io.FileIO(terminal) as screen:
            written = b"".join(iter(lambda: chunk(screen), b""))
    if process.returncode:
        sys.exit(f"manage.py systems {name} ended with {process.returncode}.")
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
