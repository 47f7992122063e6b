"""`dix tune draft-confidence`: prompts, the fitted setting, and where it is written."""

import json

import pytest

from deepinfer_cli.app import main
from deepinfer_cli.commands import tune_drafts
from engine.spec_stats import DraftReport, PlaceReport
from hicache.errors import ConfigError

PLACES = [PlaceReport(place, 100, 90 - place, 0.7, 0.2, 0.25 * place, 0.02) for place in range(1, 6)]
REPORT = DraftReport(100, 200, 150, 0.1, PLACES)
FITTED = "0.25,0.5,0.75,1,1.25"


def test_prompts_come_from_the_file_or_from_the_embedded_model(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n two \nthree\n")
    assert tune_drafts.read_prompts(file, 2) == ["one", " two "]
    held_out = tune_drafts.read_prompts(None, 20)
    assert len(set(held_out)) == 20
    file.write_text("\n")
    for path in (file, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=str(path)):
            tune_drafts.read_prompts(path, 2)


def test_another_model_needs_prompts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("deepinfer_cli.models.resolve_model", lambda call, model: (tmp_path, "big"))
    assert main(["tune", "draft-confidence", "big"]) == 2
    assert "--prompts" in capsys.readouterr().err


def test_the_setting_is_shown_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deepinfer_cli.models.resolve_model", lambda call, model: (tmp_path, "tiny"))
    monkeypatch.setattr(tune_drafts, "measure", lambda *args: REPORT)
    assert main(["tune", "draft-confidence", "--write", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["setting"] == FITTED
    assert [place["acceptance"] for place in document["places"]] == [0.89, 0.88, 0.87, 0.86, 0.85]
    assert f'dflash_confidence_head_temperature = "{FITTED}"' in (tmp_path / "dix.toml").read_text()
    assert main(["tune", "draft-confidence"]) == 0
    assert f'temperature = "{FITTED}"' in capsys.readouterr().out
