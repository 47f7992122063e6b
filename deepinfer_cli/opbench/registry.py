"""Which modules bring cases. A new module is one more name here."""

from __future__ import annotations

from importlib import import_module

from deepinfer_cli.opbench.case import Case

MODULES = ("library", "moe", "engram", "sample", "attention", "index", "layers")


def all_cases(group: str) -> list[Case]:
    """Every case of a group ("kernels", "layers"), in the order of the modules."""
    cases: list[Case] = []
    for name in MODULES:
        cases += import_module(f"deepinfer_cli.opbench.cases.{name}").CASES
    return [case for case in cases if case.group == group]
