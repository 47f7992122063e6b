"""The wheel holds every package, the embedded model and the sources of native code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import httpx
import psutil
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nothing but what the wheel holds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for path in tracked("."):  # a build in the checkout would take along what an earlier one has left there
        if path.parts[0] != "tests":
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, source / path)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, check=True, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "engine/models/tiny_checkpoint/model.safetensors" in names
    assert "csrc/kernels/page_copy.cu" in names
    assert "deepinfer_cli/recipes/smoke.toml" in names
    assert not [name for name in names if name.startswith(("tests/", "recipes/"))]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(install, check=True, cwd=folder)
    return folder / "site"


def dix(site: Path, home: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of the wheel's `dix`. It comes before an editable checkout on the path: nothing of that is imported."""
    program = f"""
import sys
sys.path.insert(0, {str(site)!r})
import engine, server
for package in (engine, server):
    assert package.__file__.startswith({str(site)!r}), package.__file__
sys.argv = ["dix", *{list(arguments)!r}]
from deepinfer_cli.main import run
run()
"""
    env = {"PATH": "/usr/bin:/bin", "DIX_HOME": str(home), "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return [sys.executable, "-P", "-c", program], env


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_an_installed_wheel_generates_text_far_from_the_checkout(site: Path, tmp_path: Path) -> None:
    command, env = dix(site, tmp_path / "home", "chat", "tiny", "--temperature", "0", "--once", "What is 23 + 45?")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "23 + 45 = 68." in done.stdout


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_an_installed_wheel_serves_the_embedded_model(site: Path, tmp_path: Path) -> None:
    """In the foreground, as `dix serve tiny` is typed: page, answer, cache proof by its own command, Ctrl-C, nothing left."""
    home = tmp_path / "home"
    command, env = dix(site, home, "serve", "tiny", "--port", "0")
    with (tmp_path / "out").open("w") as out:
        server = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        url = _ready_url(server, home, tmp_path / "out")
        assert "<html" in httpx.get(url, timeout=30).text
        body = {"messages": [{"role": "user", "content": "What is 23 + 45?"}], "temperature": 0, "thinking": {"type": "disabled"}}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        assert answer["choices"][0]["message"]["content"] == "23 + 45 = 68."
        command, env = dix(site, home, "check-cache", "--turns", "2")
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        children = psutil.Process(server.pid).children(recursive=True)
        # The front and the rank run the wheel's code; the guard beside them has no variables and needs none.
        assert sum(process.environ().get("PYTHONPATH") == str(site) for process in children) >= 2
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait(60) in (0, 130)
        assert psutil.wait_procs(children, timeout=15)[1] == []
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _ready_url(server: subprocess.Popen[bytes], home: Path, out: Path) -> str:
    """The address of the server once it says that it is ready."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert server.poll() is None, out.read_text()
        for file in home.rglob("state.json"):
            state = json.loads(file.read_text())
            if state["state"] == "ready":
                return f"http://127.0.0.1:{state['port']}"
        time.sleep(0.2)
    raise AssertionError(f"not ready: {out.read_text()}")


# Releases of torch on the public index ask for exactly one triton. An environment with torch for CPUs alone, from which the pins are easily
# frozen, has whatever release is newest, and with that pin nobody else can install.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def test_the_pinned_triton_is_the_one_that_the_pinned_torch_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.partition("#")[0].strip().split("==") for line in lines if "==" in line.partition("#")[0])
    asked = TRITON_OF_TORCH.get(pins["torch"])
    assert asked is not None, f"see what torch {pins['torch']} of the public index asks for, and add it here"
    assert pins["triton"] == asked
