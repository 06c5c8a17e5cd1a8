"""The checker finds nothing wrong in the models, and finds each fault that is planted in them."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

import django_pglock
from qa.model.checker import models

PACKAGE = Path(django_pglock.__file__).parent
MODELS = models()
FAULTS = [(model, fault) for model in MODELS for fault in model.faults]
PROPERTIES = [(model, wanted) for model in MODELS for wanted in model.properties]
#: "store/settle.py: settle `a clause of it`, SETTLE_OTHERS"
NAME = r"\w+(?: `[^`]+`)?"
REFERENCE = re.compile(rf"([\w/]+\.py): ({NAME}(?:, {NAME})*)")


def name_of(value: object) -> str | None:
    return getattr(value, "name", None)


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_no_state_violates_a_safety_property(model):
    """Each step of each transition is in some run. A step that is never taken would prove nothing."""
    verdict = model.never()
    assert verdict.violation is None, verdict.output
    assert verdict.unreached == []


@pytest.mark.parametrize(("model", "wanted"), PROPERTIES, ids=name_of)
def test_every_run_reaches_the_liveness_property(model, wanted):
    verdict = model.always(wanted)
    assert verdict.violation is None, verdict.output


@pytest.mark.parametrize(("model", "fault"), FAULTS, ids=name_of)
def test_a_planted_fault_is_found(model, fault):
    assert model.with_fault(fault).violation == fault.finds


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_the_code_that_is_named_is_there(model):
    references = REFERENCE.findall(model.text)
    assert len(references) > 3
    assert len(re.findall(r"\.py\b", model.text)) == len(references), "a reference is not written as one"
    for path, names in references:
        for name, clause in re.findall(r"(\w+)(?: `([^`]+)`)?", names):
            sources = definitions(PACKAGE / path).get(name)
            assert sources, f"{model.name}.pml: {path} has no {name}"
            assert any(flat(clause) in flat(source) for source in sources), f"{path}: {name} has no {clause!r}"


@lru_cache
def definitions(path: Path) -> dict[str, list[str]]:
    """Return the source of everything that a module defines, by name: functions, classes, constants, attributes."""
    text = path.read_text()
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(text)):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names = [getattr(node, "name", None), *(getattr(each, "id", getattr(each, "attr", None)) for each in targets)]
        for name in filter(None, names):
            found.setdefault(name, []).append(ast.get_source_segment(text, node) or "")
    return found


def flat(text: str) -> str:
    return " ".join(text.split())
