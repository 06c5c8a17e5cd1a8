"""The checker finds nothing wrong in the models, and finds each fault that is planted in them."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

import django_pglock
from qa.model.checker import Model, models
from tests.conftest import ROOT

PACKAGE = Path(django_pglock.__file__).parent
MODELS = models()
FAULTS = [(model, fault) for model in MODELS for fault in model.faults]
PROPERTIES = [(model, wanted) for model in MODELS for wanted in model.properties]
#: "store/settle.py: settle `a clause of it`, SETTLE_OTHERS"
NAME = r"\w+(?: `[^`]+`)?"
REFERENCE = re.compile(rf"([\w/]+\.py): ({NAME}(?:, {NAME})*)")
TRANSITION = re.compile(r"(?:/\*((?:(?!\*/).)*)\*/\n)?inline (\w+)\(", re.DOTALL)


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
def test_every_fault_is_used_and_everything_that_is_claimed_is_found_missing(model):
    """A flag that no fault sets, or a property that no fault breaks, may be one that cannot fail."""
    assert [fault.number for fault in model.faults] == list(range(1, len(model.faults) + 1))
    for fault in model.faults:
        assert len(re.findall(rf"\b{fault.name}\b", model.text)) > 1, fault
    flags = {f"!{flag}" for flag in re.findall(r"must_not\((\w+)", model.text)}
    assert {fault.finds for fault in model.faults} == flags | set(model.properties)


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_every_transition_names_the_code_that_it_stands_for(model):
    """The names exist, and so do the clauses that are quoted."""
    comments = {name: comment for comment, name in TRANSITION.findall(model.text)}
    taken = re.findall(r":: atomic \{ (?:[^{}]* -> )?(\w+)\(", model.text)
    assert len(set(taken)) > 5
    for transition in taken:
        assert comments[transition], f"{transition} has no comment"
        assert REFERENCE.search(comments[transition]) or comments[transition].startswith(" environment: "), transition


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


def test_the_page_names_every_model_and_fault():
    page = (ROOT / "docs" / "model.md").read_text()
    for model in MODELS:
        assert f"`{model.name}.pml`" in page
        for named in [*model.properties, *(fault.name for fault in model.faults)]:
            assert f"`{named}`" in page, f"{model.name}.pml: {named}"


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


def test_the_model_checker_reports_a_violation_only_for_the_property_that_it_breaks():
    """The checker of this folder reads what SPIN writes."""
    model = Model("fence")
    [fault] = [each for each in model.faults if each.name == "NO_RESCUE"]
    assert model.never(planted=fault.number).violation is None
    assert model.always("ends", planted=fault.number).violation == "ends"
