"""Imports point one way: deepinfer_cli -> server -> engine -> hicache -> csrc."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ["csrc", "hicache", "engine", "server", "deepinfer_cli"]
SOURCES = [p for layer in LAYERS for p in sorted((ROOT / layer).rglob("*.py"))]
VAGUE_NAMES = {"utils", "helpers", "misc", "common"}


def imported_modules(tree: ast.AST) -> list[str]:
    """Top-level names of everything a module imports, inside functions too."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names.append(node.module or "")
    return [name.split(".")[0] for name in names]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_imports_only_its_own_layer_and_those_below(path: Path) -> None:
    layer = LAYERS.index(path.relative_to(ROOT).parts[0])
    forbidden = set(LAYERS[layer + 1 :]) | {"tests", "recipes"}
    upwards = forbidden.intersection(imported_modules(ast.parse(path.read_text())))
    assert not upwards, f"{path.relative_to(ROOT)} imports {sorted(upwards)}"


def test_package_inits_are_empty() -> None:
    filled = [p for p in SOURCES if p.name == "__init__.py" and p.read_text().strip()]
    assert filled == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [p for p in SOURCES if p.stem in VAGUE_NAMES] == []


@pytest.mark.parametrize("package", ["hicache", "engine", "server"])
def test_config_modules_import_only_the_standard_library_and_knobs(package: str) -> None:
    allowed = {"__future__", "dataclasses", "enum", "typing", "hicache"}
    found = set(imported_modules(ast.parse((ROOT / package / "config.py").read_text())))
    assert found <= allowed, f"{package}/config.py imports {sorted(found - allowed)}"
