"""Files and classes that README and docs name exist, so that a reader who follows them never turns back."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_FILE = re.compile(r"`([\w./*-]+\.(?:py|cpp|cuh?|h|toml|sh))(?:: ([\w.]+))?`")
_LINK = re.compile(r"\]\(([^)#:]+)\)")


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a checkout: nothing says which files belong to the project")
    return done.stdout.splitlines()


def named_files(page: Path) -> list[tuple[str, str]]:
    """(file, what is in it or ""). Names of a checkpoint's or a user's own files are not ours."""
    theirs = {"dix.toml", "config.toml", "encoding/encoding.py", "encoding.py"}
    return [(file, inside) for file, inside in _FILE.findall(page.read_text(encoding="utf-8")) if file not in theirs]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    files = tracked()
    for name, inside in named_files(page):
        pattern = re.compile(rf"(^|/){re.escape(name).replace(re.escape('*'), '[^/]*')}$")
        found = [file for file in files if pattern.search(file)]
        assert found, f"{page.name} names {name}"
        if inside:
            texts = [(ROOT / file).read_text(encoding="utf-8") for file in found]
            wanted = re.compile(rf"(def|class) {inside.rpartition('.')[2]}\b")
            assert any(map(wanted.search, texts)), f"{page.name} names {inside} in {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_a_name_that_does_not_exist_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("See `engine/no_such_module.py` and `engine/engine.py: Engine.step`.")
    assert named_files(page) == [("engine/no_such_module.py", ""), ("engine/engine.py", "Engine.step")]
    with pytest.raises(AssertionError, match="no_such_module"):
        test_every_file_that_a_page_names_exists(page)
