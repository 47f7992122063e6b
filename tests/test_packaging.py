"""The wheel holds every package, the embedded model and the sources of native code."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP = ("deepinfer_cli", "server", "engine", "hicache", "csrc")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def tracked(*under: str) -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z", *under], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in done.stdout.split("\0") if name]


@pytest.fixture(scope="module", autouse=True)
def checkout() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: nothing says which files belong to the project")


def test_every_package_is_listed() -> None:
    found = {".".join(path.parent.parts) for path in tracked(*TOP) if path.suffix == ".py"}
    assert found == set(SETTINGS["packages"]) - {"deepinfer_cli.recipes"}


def test_every_data_file_matches_a_listed_pattern() -> None:
    matched = {
        path.relative_to(ROOT)
        for package, patterns in SETTINGS["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    missing = [path for path in tracked(*TOP) if path.suffix != ".py" and path not in matched]
    assert missing == []


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_an_installed_wheel_generates_text_far_from_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "engine/models/tiny_checkpoint/model.safetensors" in names
    assert "csrc/kernels/page_copy.cu" in names
    assert "deepinfer_cli/recipes/smoke.toml" in names
    assert not [name for name in names if name.startswith(("tests/", "recipes/"))]
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, cwd=tmp_path)
    # The target comes before the editable checkout on the path, and nothing of the checkout is imported.
    program = f"""
import sys
sys.path.insert(0, {str(site)!r})
import engine
assert engine.__file__.startswith({str(site)!r}), engine.__file__
sys.argv = ["dix", "chat", "tiny", "--temperature", "0", "--once", "What is 23 + 45?"]
from deepinfer_cli.main import run
sys.exit(run())
"""
    env = {"PATH": "/usr/bin:/bin", "DIX_HOME": str(tmp_path / "home"), "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "23 + 45 = 68." in done.stdout
