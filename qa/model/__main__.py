"""Print the table of docs/evidence/model.md: ``python -m qa.model``."""

from __future__ import annotations

import resource

from qa.model.checker import models


def seconds() -> float:
    """Return the CPU time of all programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    for model in models():
        began = seconds()
        never = model.never()
        always = [model.always(each) for each in model.properties]
        verdict = never.violation or next((each.violation for each in always if each.violation), None) or "holds"
        states = " + ".join(f"{each.states:,}" for each in [never, *always])
        print(f"| `{model.name}.pml` | {states} | {seconds() - began:.1f} s | {len(model.faults)} | {verdict} |")


if __name__ == "__main__":
    main()
