"""The checkpoint's own chat encoder: found, checked for trust, loaded and tested before anything is served."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.errors import CheckpointError
from engine.models import tiny_encoding
from engine.models.config import read_config_json
from engine.tokenizer import Tokenizer
from server.checkpoint_code import load_code
from server.dialect import Dialect, Tags
from server.errors import BadRequest, ConfigError

log = logging.getLogger(__name__)

MODEL_TYPE = "deepseek_v41"
_INTERFACE = ("encode_messages", "parse_message_from_completion_text", "load_cases", "encode_case")
# What an encoder raises for input that has no rendering; the last two come from indexing malformed parts.
_INPUT_ERRORS = (AssertionError, ValueError, NotImplementedError, TypeError, KeyError, RecursionError, AttributeError, IndexError)

_PROBE = "probe"
_PROBE_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}


@dataclass(frozen=True, slots=True)
class Encoder:
    """A loaded `encoding.py`. `sha256` names its revision."""

    module: ModuleType
    dialect: Dialect
    sha256: str

    def encode(self, messages: list[dict[str, Any]], *, thinking: bool, effort: str | int | None = None) -> tuple[str, list[Any]]:
        """Prompt text and image records of a normalised conversation.

        Raises:
            BadRequest: the encoder has no rendering for it.
        """
        mode = "thinking" if thinking else "chat"
        try:
            prompt, extra = self.module.encode_messages(messages, mode, reasoning_effort=effort, return_multi_modal_data=True)
            return str(prompt), list(extra["images"])
        except _INPUT_ERRORS as error:
            # Text of the encoder may quote the client; the API never echoes more than 64 characters of a value.
            raise BadRequest("messages", f"the conversation cannot be encoded: {_short(error)}") from error


@dataclass(frozen=True, slots=True)
class ControlIds:
    """Token ids of the controls that steer output parsing."""

    eos: int
    think_start: int
    think_end: int
    dsml: int


def load_chat_format(directory: Path, trust: bool = False, *, dummy: bool = False) -> tuple[Tokenizer, Encoder]:
    """Tokenizer and encoder of a model directory. dummy: its weights are random, and the embedded model's encoder may stand in for a
    missing one.

    Raises:
        CheckpointError, ConfigError: a file is missing, malformed or not trusted, or the tokenizer lacks control tokens.
    """
    path = directory / "tokenizer.json"
    if dummy and not path.exists():
        raise CheckpointError(f"{path} is missing", hint=f"copy a tokenizer there, or let `dix model shapes {directory}` write a stand-in")
    tokenizer = Tokenizer.from_dir(directory)
    if not dummy or (directory / "encoding").exists():
        return tokenizer, load_encoder(directory, trust)
    encoder = embedded_encoder()
    try:
        control_ids(encoder.dialect, tokenizer)
    except CheckpointError as error:
        raise CheckpointError(
            f"{directory} holds no encoding/, and the embedded model's chat format does not fit its tokenizer: {error}",
            hint="copy encoding/ of the release, or remove tokenizer.json and let `dix model shapes` write both",
        ) from error
    log.warning("%s holds no encoding/: the chat format of the embedded model stands in for it", directory)
    return tokenizer, encoder


def load_encoder(model_dir: Path, trust: bool = False) -> Encoder:
    """Load and test the encoder of a model directory.

    Raises:
        CheckpointError: no encoder, several, an untrusted or unsafe one, or one that fails the checkpoint's own cases.
        ConfigError: the interpreter strips assertions, on which encoders rely for their input checks.
    """
    if not __debug__:
        raise ConfigError("python -O removes the encoder's input checks", hint="run without -O and with PYTHONOPTIMIZE unset")
    path = _find(Path(model_dir))
    encoder = _open(path, trust)
    cases = run_cases(encoder, path.parent / "tests")
    log.info("encoder %s, SHA-256 %s, %d cases reproduced", path, encoder.sha256, cases)
    return encoder


def embedded_encoder() -> Encoder:
    """The embedded model's own, which stands in where there are no weights either."""
    return _open(Path(tiny_encoding.__file__), trust=False)


def _open(path: Path, trust: bool) -> Encoder:
    module, digest = load_code(path, trust=trust)
    missing = [name for name in _INTERFACE if not callable(getattr(module, name, None))]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}", hint="this is not a DeepSeek-V4.1 encoder")
    return Encoder(module, _read_dialect(module, path), digest)


def _find(model_dir: Path) -> Path:
    config_path = model_dir / "config.json"
    if config_path.exists():
        model_type = read_config_json(model_dir).get("model_type")
        if model_type != MODEL_TYPE:
            raise CheckpointError(
                f"{config_path} has model_type {model_type!r}", hint=f"this server speaks the chat format of {MODEL_TYPE} only"
            )
    folder = model_dir / "encoding"
    found = sorted(folder.glob("*.py")) if folder.is_dir() else []
    if [path.name for path in found] != ["encoding.py"]:
        names = ", ".join(path.name for path in found) or "nothing"
        raise CheckpointError(f"{folder} holds {names}; exactly encoding.py is expected", hint="copy the folder encoding/ of the release")
    return found[0]


def run_cases(encoder: Encoder, folder: Path) -> int:
    """Reproduce every `test_input_N.json` of a checkpoint. Returns how many there were.

    Raises:
        CheckpointError: there is none, one lacks its expected text, or one differs.
    """
    inputs = sorted(folder.glob("test_input_*.json"))
    if not inputs:
        raise CheckpointError(f"{folder} holds no test_input_*.json", hint="copy the folder encoding/tests of the release")
    for path in inputs:
        expected_path = path.with_name(path.name.replace("test_input_", "test_output_")).with_suffix(".txt")
        try:
            expected = expected_path.read_text(encoding="utf-8")
            cases = encoder.module.load_cases(str(path))
            cases = cases if isinstance(cases, list) else [cases]
            rendered = "".join(encoder.module.encode_case(case, "chat") for case in cases)
        except (OSError, *_INPUT_ERRORS) as error:
            raise CheckpointError(
                f"{path} cannot be checked: {type(error).__name__}: {error}", hint="download the folder encoding/ again"
            ) from error
        if rendered != expected:
            raise CheckpointError(
                f"{path.name} renders differently from {expected_path}", hint="encoding.py and its tests come from different releases"
            )
    return len(inputs)


def _read_dialect(module: ModuleType, path: Path) -> Dialect:
    """Spellings from the module's names where it has them, and from what it renders for the rest."""
    try:
        dsml = str(module.dsml_token)
        efforts = {str(name): int(value) for name, value in module.REASONING_EFFORT_MAPPINGS.items()}
        user, _, chat = str(module.encode_messages([{"role": "user", "content": _PROBE}], "chat")).rpartition(_PROBE)
        thinking = _tail(module.encode_messages([{"role": "user", "content": _PROBE}], "thinking"))
        calls = module.encode_messages(
            [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}], "chat"
        )
        return Dialect(
            bos=str(module.bos_token),
            eos=str(module.eos_token),
            think_start=str(module.thinking_start_token),
            think_end=str(module.thinking_end_token),
            dsml=dsml,
            image=str(module.IMAGE_PLACEHOLDER),
            user=user.removeprefix(str(module.bos_token)),
            header_thinking=thinking,
            header_chat=chat,
            tasks=dict(_first(module, "TASK_TOKENS", "DS_TASK_SP_TOKENS", "TASK_SP_TOKENS", default={})),
            efforts=efforts,
            default_effort=efforts["high"],
            tags=_tags(calls, dsml),
        )
    except (*_INPUT_ERRORS, AttributeError) as error:
        raise CheckpointError(f"{path} does not behave like a V4.1 encoder: {_short(error)}", hint="use the file of the release") from error


def _tags(rendered: str, dsml: str) -> Tags:
    words = [piece.split(">")[0] for piece in rendered.split(f"<{dsml}")[1:]]
    if len(words) != 3:
        raise ValueError(f"a call renders with {len(words)} opening tags, not 3")
    return Tags.of(words[0], words[1].split(' name="')[0], words[2].split(' name="')[0])


def _tail(rendered: str) -> str:
    return rendered.rpartition(_PROBE)[2]


def _first(module: ModuleType, *names: str, default: Any) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), default)


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 64 else text[:61] + "..."


def control_ids(dialect: Dialect, tokenizer: Tokenizer) -> ControlIds:
    """Ids of the dialect's controls; also the start-up check that tokenizer and encoder belong together.

    Raises:
        CheckpointError: a control spelling is not a single token.
    """
    if tokenizer.encode(dialect.bos) != [tokenizer.token_id(dialect.bos)]:
        raise CheckpointError(
            f"{dialect.bos!r} does not encode to one id", hint="tokenizer.json and encoding.py belong to different releases"
        )
    for header in (dialect.header_chat, dialect.header_thinking):
        if any(token_id not in tokenizer.added.values() for token_id in tokenizer.encode(header)):
            raise CheckpointError(
                f"the header {header!r} is not made of control tokens", hint="tokenizer.json and encoding.py do not match"
            )
    return ControlIds(
        eos=tokenizer.token_id(dialect.eos),
        think_start=tokenizer.token_id(dialect.think_start),
        think_end=tokenizer.token_id(dialect.think_end),
        dsml=tokenizer.token_id(dialect.dsml),
    )
