from __future__ import annotations

from pathlib import Path

from deepinfer_cli.bench.runs import find_runs, list_runs, new_run
from deepinfer_cli.outputs import write_json


def test_runs_of_one_second_stay_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    """Ids were random: two runs of a sweep that began within a second changed places, and `last` was either of them."""
    begun = []
    for number in range(60):
        folder = new_run(tmp_path, ("smoke", "agentx", "z")[number % 3])
        write_json(folder / "run.json", {"id": folder.name, "status": "complete"})
        begun.append(folder.name)
    assert [run["id"] for run in list_runs(tmp_path)] == begun
    assert [path.name for path in find_runs(tmp_path, "last")] == begun[-1:]
