"""Somebody hands over a model directory: every file of it hostile. Each attempt ends as one clear error, soon, and runs nothing."""

from __future__ import annotations

import json
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepinfer_cli.commands.model import describe
from engine.errors import CheckpointError
from engine.loader import Checkpoint, checkpoint_files, model_fingerprint, open_checkpoint
from engine.models import tiny
from engine.models.config import load_config, parse_config
from engine.tokenizer import Tokenizer
from server.checkpoint_code import load_code
from server.encoding import load_encoder
from tests.server.vectors import write_text_files

CONFIG = parse_config(tiny.tiny_config())
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DEEP = "[" * 200_000


def refused(attempt: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        attempt(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    return message


def write_weights(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return folder


HOSTILE = [
    (b"{}", 2**63), (b"{}", 2**64 - 1), (b"{}", 100_000_001), (b"{}", 3), (DEEP.encode(), None), (b"[]", None), (b"5", None),
    (b"null", None), (b'{"\xff": 1}', None), (b'{"a": 1, "a": 2}', None), ({"a": [1]}, None),
    ({"a": {**F32, "data_offsets": ["a", "b"]}}, None), ({"a": {**F32, "data_offsets": [0, 1e999]}}, None),
    ({"a": {**F32, "data_offsets": [0]}}, None), ({"a": {**F32, "data_offsets": [0, 2**62]}}, None),
    ({"a": {**F32, "data_offsets": [-4, 0]}}, None), ({"a": {**F32, "shape": None}}, None), ({"a": {**F32, "shape": "ab"}}, None),
    ({"a": {**F32, "shape": [-1]}}, None), ({"a": {**F32, "dtype": "F1024"}}, None), ({"a": F32, "model.a": F32}, None),
    (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}', None),
]  # fmt: skip


@pytest.mark.parametrize(("header", "length"), HOSTILE)
def test_a_hostile_header_is_one_clear_error(tmp_path: Path, header: Any, length: int | None) -> None:
    folder = write_weights(tmp_path, header, length=length)
    refused(open_checkpoint, folder, CONFIG)
    (folder / "config.json").write_text(json.dumps(tiny.tiny_config()))
    with suppress(CheckpointError):  # it does not compare with the config
        describe(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_looking_into_a_directory_waits_for_nothing_either(tmp_path: Path, name: str, make: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    refused(describe, tmp_path)


@pytest.mark.parametrize("config", ["[]", '{"text_config": [1]}', '{"architectures": {"a": []}, "hidden_size": "\\u001b[2J"}', DEEP])
def test_looking_into_a_directory_believes_no_config(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with suppress(CheckpointError):
        assert describe(tmp_path)["files"] == 0


@pytest.mark.parametrize("offsets", [[[0, 4], [0, 4]], [[0, 4], [2, 6]], [[4, 8], [0, 4]], [[0, 3], [3, 8]], [[-4, 0], [0, 8]]])
def test_what_only_the_library_notices_is_the_same_kind_of_error(tmp_path: Path, offsets: list[list[int]]) -> None:
    """Tensors that overlap, leave gaps or lie in front of the data: refused when the file is opened, or read as written."""
    names = ("a", "b")
    header = {name: {**F32, "data_offsets": span} for name, span in zip(names, offsets, strict=True)}
    write_weights(tmp_path, header, bytes(max(end for _, end in offsets)))
    from engine.loader import _Entry

    entries = {name: _Entry(tmp_path / WEIGHTS, name, "F32", (1,)) for name in names}
    checkpoint = Checkpoint(CONFIG, entries)
    if offsets == [[4, 8], [0, 4]]:
        assert float(checkpoint._read("a")) == 0
    else:
        refused(checkpoint._read, "a")


@pytest.mark.parametrize(
    "names",
    [
        ["../../etc/passwd"], ["/etc/passwd"], ["../outside.safetensors"], ["a/b.safetensors"], [1], [None], ["a", 1], [["a"]], [{"a": 1}],
        ["x\0.safetensors"], ["x" * 5000 + ".safetensors"], ["."], [""], ["config.json"],
    ],
)  # fmt: skip
def test_an_index_names_only_files_beside_it(tmp_path: Path, names: list[Any]) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))
    message = refused(checkpoint_files, directory)
    assert "root:" not in message


@pytest.mark.parametrize("text", [DEEP, "", "[1]", '{"weight_map": 5}', '{"weight_map": []}', "\udcff"])
def test_a_broken_index_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(checkpoint_files, tmp_path)


def test_links_into_a_store_of_blobs_still_load(tmp_path: Path) -> None:
    """What a hub's cache looks like: names in a snapshot lead to files elsewhere."""
    (tmp_path / "model").mkdir()
    write_weights(tmp_path, {"a": F32}, bytes(4))
    (tmp_path / "model" / WEIGHTS).symlink_to(tmp_path / WEIGHTS)
    assert checkpoint_files(tmp_path / "model") == [tmp_path / "model" / WEIGHTS]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_directory_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str, make: Any) -> None:
    write_text_files(tmp_path)
    write_weights(tmp_path, {"a": F32}, bytes(4))
    (tmp_path / name).unlink()
    make(tmp_path / name)
    attempts = {WEIGHTS: lambda: open_checkpoint(tmp_path, CONFIG), "config.json": lambda: load_config(tmp_path)}
    refused(attempts.get(name, lambda: Tokenizer.from_dir(tmp_path)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9), ("num_hidden_layers", -1), ("vocab_size", 10**30), ("hidden_size", "x"), ("hidden_size", 0),
        ("hidden_size", float("nan")), ("hidden_size", float("inf")), ("rope_theta", float("nan")), ("rms_norm_eps", float("inf")),
        ("n_routed_experts", 10**9), ("dspark_n_routed_experts", 10**9), ("hidden_size", [1]), ("hidden_size", True), ("hidden_size", {}),
    ],
)  # fmt: skip
def test_absurd_sizes_are_refused_before_anything_is_counted_up(field: str, value: Any) -> None:
    raw = json.loads(json.dumps(tiny.tiny_config()))
    raw["text_config"][field] = value
    assert field in refused(parse_config, raw)


def test_sizes_that_no_weights_can_match_are_refused_by_the_weights(tmp_path: Path) -> None:
    raw = json.loads(json.dumps(tiny.tiny_config()))
    raw["text_config"]["vocab_size"] = 10**9
    write_weights(tmp_path, {"embed.weight": F32}, bytes(4))
    refused(open_checkpoint, tmp_path, parse_config(raw))


@pytest.mark.parametrize("text", [DEEP, "[1]", '{"a": ' + "9" * 5000 + "}", "\udcff", "", "null"])
def test_a_broken_config_is_one_clear_error_for_engine_and_server(tmp_path: Path, text: str) -> None:
    write_text_files(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    for attempt in (load_config, load_encoder):
        refused(attempt, tmp_path)


def tokenizer(folder: Path, **changes: Any) -> Tokenizer:
    data = json.loads(tiny.TOKENIZER_FILE.read_text(encoding="utf-8")) | changes
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return Tokenizer.from_dir(folder)


def split_by(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {}}, {"model": None}, {"added_tokens": ["x"]}, {"added_tokens": [{"id": -1, "content": "x"}]}, {"added_tokens": 5},
        {"pre_tokenizer": split_by("(")}, {"pre_tokenizer": {"type": "Python", "code": "import os"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    ],
)  # fmt: skip
def test_a_hostile_tokenizer_file_is_one_clear_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    refused(tokenizer, tmp_path, **changes)


def test_a_tokenizer_that_wants_code_or_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": "evil.Tokenizer"}}))
    refused(tokenizer, tmp_path)
    (tmp_path / "tokenizer.json").write_text(DEEP)
    refused(Tokenizer.from_dir, tmp_path)


def test_a_pattern_that_backtracks_without_end_is_an_exception_and_no_panic(tmp_path: Path) -> None:
    """The library panics, and a panic is no Exception: it would pass every handler between here and the event loop."""
    made = tokenizer(tmp_path, pre_tokenizer=split_by("(a+)+$"))
    with pytest.raises(RuntimeError, match="the tokenizer failed"):
        made.encode_plain("a" * 40 + "b")


@pytest.mark.parametrize(
    "code",
    [
        "import typing; typing.sys.modules['os'].system('true')", "from typing import sys", "import json; json.codecs.open('/etc/passwd')",
        "import re; re.enum.sys.exit(3)", "getattr(json, 'co' + 'decs')", "g = getattr", "getattr(json, '__loader__')", "vars(json)",
        "globals()['x'] = 1", "def f(x: \"__import__('os')\"): ...\nimport typing\ntyping.get_type_hints(f)",
        "(x for x in ()).gi_frame.f_builtins", "(lambda: 0).__globals__", "(lambda: 0).__code__", "type.__subclasses__(type)",
        "class X:\n    def __reduce__(self): ...\nX().__reduce_ex__(2)",
    ],
)  # fmt: skip
def test_known_ways_out_of_an_encoder_are_refused_even_when_it_is_trusted(tmp_path: Path, code: str) -> None:
    path = tmp_path / "encoding.py"
    path.write_text("import json\n" + code + "\n")
    assert "encoding.py:" in refused(load_code, path, trust=True)


def test_plain_code_is_no_way_out(tmp_path: Path) -> None:
    path = tmp_path / "encoding.py"
    path.write_text("import json, re\nname = getattr(json, 'dumps').__name__\nclass A:\n    def __init__(self): self.x = 1\n")
    assert load_code(path, trust=True)[0].name == "dumps"


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "raise RecursionError", "1 / 0", "def f(): f()\nf()", "x = 'a' * 10**18"])
def test_an_encoder_that_ends_the_program_is_one_clear_error(tmp_path: Path, code: str) -> None:
    path = tmp_path / "encoding.py"
    path.write_text(code)
    refused(load_code, path, trust=True)


def test_an_unknown_encoder_does_not_run_without_trust(tmp_path: Path) -> None:
    write_text_files(tmp_path)
    marker = tmp_path / "ran"
    with (tmp_path / "encoding" / "encoding.py").open("a") as file:
        file.write(f"\nprint('x')\nopen({str(marker)!r}, 'w')\n")
    assert "unknown code" in refused(load_encoder, tmp_path)
    assert not marker.exists()


def test_a_fingerprint_reads_no_file_outside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../../../../../../etc/passwd"}}))
    refused(model_fingerprint, tmp_path)
