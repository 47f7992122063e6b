import os
import subprocess
import sys

from engine.process_env import available_cores, prefill_threads, prepare_process, resolve_threads


def test_automatic_threads_share_the_cores_among_ranks():
    cores = available_cores()
    assert cores >= 1
    assert resolve_threads("auto", 1) == max(1, cores - 1)
    assert resolve_threads("auto", 10 * cores) == 1
    assert resolve_threads(3, 8) == 3


def test_prefill_may_use_every_core_unless_a_number_is_set():
    cores = available_cores()
    assert prefill_threads("auto", 1) == cores
    assert prefill_threads("auto", 10 * cores) == 1
    assert prefill_threads(1, 1) == 1


def test_variables_of_the_user_win(monkeypatch):
    for name in ("MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TOKENIZERS_PARALLELISM", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    changed = prepare_process(2)
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in changed
    assert changed["MKL_NUM_THREADS"] == "2"


def test_waiting_threads_do_not_spin():
    code = "import os, engine.process_env as e; e.prepare_process(2); assert os.environ['OMP_WAIT_POLICY'] == 'passive'"
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_preparing_the_process_does_not_load_torch():
    code = "import sys, engine.process_env, engine.prefill_gate; engine.process_env.prepare_process(1); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_prepared_threads_reach_torch():
    code = "import engine.process_env as e; e.prepare_process(1); import torch; assert torch.get_num_threads() == 1"
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
