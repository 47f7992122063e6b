"""All settings in one object, where each value came from, and the only reader of the environment and of `dix.toml`.

Precedence: flag and `--set` > `DIX_<SECTION>_<KEY>` and foreign aliases > `./dix.toml` (nearest upwards) > user `config.toml` > default.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from deepinfer_cli.config import BenchConfig, UiConfig
from deepinfer_cli.units import parse_duration, parse_size
from engine.config import EngineConfig
from hicache.config import HiCacheConfig
from hicache.errors import ConfigError
from hicache.knob import Knob
from server.config import ServerConfig

SECTIONS: dict[str, type[Any]] = {
    "engine": EngineConfig,
    "hicache": HiCacheConfig,
    "server": ServerConfig,
    "bench": BenchConfig,
    "ui": UiConfig,
}
# Known without being a setting.
OTHER_VARIABLES = frozenset({"DIX_HOME"})
# A cluster puts the addresses of a service named dix into every container's environment.
INJECTED = re.compile(r"DIX_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP)(_.*)?)")
# Names of the reference release that have no effect in this engine; a warning says so.
UNUSED_ALIASES = frozenset(
    """
    JIT_CACHE_DIR CPP_LOG_LEVEL NCCL_NUM_SMS USERBUFFER_COMM_SMS GLOO_TIMEOUT REARRANGE_P2P_GROUPS
    PREFILL_MAX_SUM_SEQLEN_K INDEX_ATTN_MEMORY_LIMIT
    MAX_BACKTRACKING_TOKENS ENGRAM_PAD_TOKEN ENGRAM_FORCE_GPU_STORAGE
    SAMPLER_FORCE_TOPK DECODE_TOKEN_BLACKLIST COMPUTE_SUM_SMALLER_PROBS
    DFLASH_ENFORCE_EAGER DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL DECODE_PERF_CACHE_DIR DECODE_PERF_CACHE_TTL_SEC
    PREFILL_STORE_EXTRA_STATE PREFILL_STORE_EXTRA_SIZE XGRAMMAR_DEBUG XGRAMMAR_TIMEOUT
    XGRAMMAR_DISABLE_CACHE XGRAMMAR_CACHE_LIMIT_BYTES SO_BUILDER_CPUS LOGGING_INTERVAL_STEP
    NCCL_MEMORY_SAMPLE_INTERVAL_STEPS RINGBUFFER_WARNING_INTERVAL GC_INTERVAL_STEP DISABLE_SYNC_GUARD
    PROFILE_TORCH_CUDA_MEMORY ENABLE_MEMORY_TRACING PROFILE_HTTP_ENABLE PROFILE_HTTP_PORT_BASE TORCH_PROFILER_DIR
    USE_MULTIMODAL_POOL MULTIMODAL_POOL_SIZE_GB MULTI_MODAL_BUFFER_SIZE MULTI_MODAL_WORKER_TIMEOUT
    """.split()  # noqa: SIM905  (a list of forty lines says no more)
)
# Read elsewhere in this package: the model directory when no model is named.
MODEL_VARIABLE = "DEEPINFER_HF_MODEL_DIR"
ALIAS_WORDS = {"engine.device": {"nvidia": "cuda"}}
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True, slots=True)
class Settings:
    """Every section's frozen configuration."""

    engine: EngineConfig
    hicache: HiCacheConfig
    server: ServerConfig
    bench: BenchConfig
    ui: UiConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of one section and the names that follow from it."""

    section: str
    name: str
    types: tuple[type, ...]
    default: Any
    knob: Knob

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        return f"DIX_{self.section}_{self.name}".upper()

    @property
    def flag(self) -> str:
        """Flags of the host cache carry its name. A field in seconds takes a time with a unit, so its flag drops the `_s`."""
        name = self.name.removesuffix("_s") if self.knob.unit == "s" else self.name
        return "--" + (f"hicache-{name}" if self.section == "hicache" else name).replace("_", "-")


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value and where it came from: `flag`, `environment`, a file's path or `default`."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings of one command, each with its provenance, and what the user should hear about them."""

    values: dict[str, Value]
    warnings: list[str] = field(default_factory=list)

    def section(self, name: str) -> Any:
        """The frozen configuration of one section. Raises: ConfigError for a value outside its range."""
        return SECTIONS[name](**{s.name: self.values[s.key].value for s in all_settings().values() if s.section == name})

    def settings(self) -> Settings:
        return Settings(**{name: self.section(name) for name in SECTIONS})

    def given(self, key: str) -> bool:
        """Whether the user chose this value, in whatever way."""
        return self.values[key].source not in ("default", "server default")

    def plain(self) -> dict[str, dict[str, Any]]:
        """Section -> field -> value, for JSON and TOML."""
        out: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for key, value in self.values.items():
            section, name = key.split(".", 1)
            out[section][name] = value.value
        return out


@cache
def all_settings() -> dict[str, Setting]:
    """Key (`engine.max_num_seqs`) -> Setting, in the order of declaration."""
    out = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            if "knob" in item.metadata:
                types = typing.get_args(hints[item.name]) or (hints[item.name],)
                setting = Setting(section, item.name, types, item.default, item.metadata["knob"])
                out[setting.key] = setting
    return out


def resolve(
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    files: list[Path],
    defaults: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merge all sources. `flags`: key -> value or text. `files`: weakest last. `defaults`: key -> a command's own default.

    Raises:
        ConfigError: a name nobody knows (with the nearest known one), a value of the wrong type, or two spellings that disagree.
    """
    values = {key: Value(s.default, "default") for key, s in all_settings().items()}
    values |= {key: Value(value, "server default") for key, value in (defaults or {}).items()}
    for path in reversed(files):
        values |= {key: Value(value, str(path)) for key, value in read_file(path).items()}
    environment, warnings = read_environment(environ)
    values |= {key: Value(value, "environment") for key, value in environment.items()}
    for key, given in flags.items():
        values[key] = Value(convert(known(key, "setting"), given, f"--set {key}"), "flag")
    return Resolved(values, warnings)


def known(key: str, what: str) -> Setting:
    """The setting of that key. Raises: ConfigError with the nearest name."""
    settings = all_settings()
    if key in settings:
        return settings[key]
    raise ConfigError(f"{key} is not a {what}", hint=suggest(key, list(settings), "dix config list"))


def suggest(name: str, names: list[str], where: str) -> str:
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    return (f"did you mean {near[0]}? " if near else "") + f"all names: {where}"


def convert(setting: Setting, given: Any, where: str) -> Any:
    """A text or a TOML value -> the field's type. Raises: ConfigError naming the place and the value."""
    if isinstance(given, str):
        return _from_text(setting, given, where)
    if isinstance(given, bool) and bool not in setting.types:
        raise ConfigError(f"{where} is {given!r}", hint=f"{setting.key} takes {_wanted(setting)}")
    if isinstance(given, int) and int not in setting.types and float in setting.types:
        return float(given)
    if isinstance(given, setting.types):
        return given
    raise ConfigError(f"{where} is {given!r}", hint=f"{setting.key} takes {_wanted(setting)}")


def _from_text(setting: Setting, text: str, where: str) -> Any:
    lower = text.strip().lower()
    if bool in setting.types and lower in (*TRUE, *FALSE):
        return lower in TRUE
    if lower == "auto" and setting.default == "auto":
        return lower
    number = next((t for t in (int, float) if t in setting.types), None)
    if number is not None:
        return _number(setting, text, number, where)
    if bool not in setting.types:
        return text
    raise ConfigError(f"{where} is {text!r}", hint=f"{setting.key} takes {_wanted(setting)}")


def _number(setting: Setting, text: str, number: type, where: str) -> Any:
    try:
        if setting.knob.unit == "s":
            return parse_duration(text, where)
        if setting.knob.unit == "bytes":
            return parse_size(text, where)
        if number is float and text.strip().endswith("%"):
            return float(text.strip()[:-1]) / 100
        return number(text.replace("_", ""))
    except ValueError:
        raise ConfigError(f"{where} is {text!r}", hint=f"{setting.key} takes {_wanted(setting)}") from None


def _wanted(setting: Setting) -> str:
    if setting.knob.choices:
        return ", ".join(map(str, setting.knob.choices))
    words = {int: "an integer", float: "a number", bool: "true or false", str: "auto" if setting.default == "auto" else "text"}
    unit = f" ({setting.knob.unit})" if setting.knob.unit else ""
    return " or ".join(words[t] for t in setting.types if t in words) + unit


def read_file(path: Path) -> dict[str, Any]:
    """Key -> value of one TOML file. Raises: ConfigError for a file that cannot be read and for unknown names."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="dix config path shows where files are looked for") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", hint="dix config init writes a commented example") from None
    out = {}
    for section, entries in document.items():
        if section not in SECTIONS or not isinstance(entries, dict):
            raise ConfigError(f"{path}: [{section}] is not a section", hint=suggest(section, list(SECTIONS), "dix config list"))
        for name, value in entries.items():
            setting = known(f"{section}.{name}", f"setting (in {path})")
            out[setting.key] = convert(setting, value, f"{path}: {setting.key}")
    return out


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Key -> value of `DIX_*` variables and foreign aliases, and warnings about aliases without an effect."""
    out: dict[str, Any] = {}
    variables = {s.variable: s for s in all_settings().values()}
    for name in sorted(environ):
        if not name.startswith("DIX_") or name in OTHER_VARIABLES or _injected(name, environ[name]):
            continue
        if name not in variables:
            raise ConfigError(f"{name} is not a setting", hint=suggest(name, list(variables), "dix config list"))
        out[variables[name].key] = convert(variables[name], environ[name], name)
    aliases = {alias: s for s in all_settings().values() for alias in s.knob.aliases}
    ignored = []
    for name in sorted(n for n in environ if n.startswith("DEEPINFER_") and n != MODEL_VARIABLE):
        if name not in aliases:
            ignored.append(name)
            continue
        _take_alias(aliases[name], name, environ, out)
    known_names = [n for n in ignored if n.removeprefix("DEEPINFER_") in UNUSED_ALIASES]
    unknown_names = [n for n in ignored if n not in known_names]
    warnings = [f"without effect in this engine: {', '.join(known_names)}"] if known_names else []
    warnings += [f"unknown and ignored: {', '.join(unknown_names)}"] if unknown_names else []
    return out, warnings


def _injected(name: str, value: str) -> bool:
    return INJECTED.fullmatch(name) is not None or (name.endswith("_PORT") and value.startswith(("tcp://", "udp://")))


def _take_alias(setting: Setting, name: str, environ: Mapping[str, str], out: dict[str, Any]) -> None:
    text = ALIAS_WORDS.get(setting.key, {}).get(environ[name], environ[name])
    value = convert(setting, text, name)
    if setting.variable in environ and out[setting.key] != value:
        raise ConfigError(
            f"{name} is {environ[name]!r} but {setting.variable} is {environ[setting.variable]!r}", hint="unset one of the two"
        )
    out[setting.key] = value


def find_files(explicit: Path | None, start: Path, user: Path) -> list[Path]:
    """The files to read, strongest first: `--config`, else the nearest `dix.toml` upwards; then the user's."""
    if explicit is not None:
        local: list[Path] = [explicit]
    else:
        local = [folder / "dix.toml" for folder in (start, *start.parents) if (folder / "dix.toml").is_file()][:1]
    return local + ([user] if user.is_file() else [])
