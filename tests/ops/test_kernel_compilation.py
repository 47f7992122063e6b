import os
import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_kernels_compile_for_sm90_without_a_gpu():
    """In a process of its own: here kernels may be defined for the interpreter."""
    pytest.importorskip("triton")
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_kernels"], env=plain, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    products = dict(re.findall(r"^(\w[\w ]*?\w)\s+\d+ bytes shared,\s+(\d+) wgmma$", done.stdout, re.MULTILINE))
    assert all(int(products[name]) > 0 for name in ("attend", "attend hopper", "attend roles 4", "attend roles 8", "score")), products
