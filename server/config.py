"""Settings of the HTTP front and the process tree (section `server`). Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.errors import ConfigError
from hicache.knob import check_knobs, knob

METRIC_NAMESPACES = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything between a socket and the engine processes."""

    host: str = knob("127.0.0.1", "Address to listen on.", common=True)
    port: int = knob(8888, "Port to listen on; 0 takes any free one.", ge=0, le=65535, common=True)
    served_name: str = knob("", "Model name that clients see; empty takes the model's own.", common=True)
    routing: str = knob("affinity", "How the rank of a request is chosen.", choices=("affinity", "least-loaded", "cost"), common=True)
    router_mb: float = knob(256.0, "Memory for remembering which rank has which conversation.", unit="MB", gt=0)
    api_key_file: str = knob("", "File with one accepted API key per line.")
    require_key: bool = knob(False, "Refuse to listen on other than loop-back addresses without an API key.")
    allow_origin: str = knob("", "Origins of web pages that may call this server, comma separated; * allows any.")
    trust_checkpoint_code: bool = knob(False, "Run the checkpoint's encoding.py although its hash is not on the allow list.")
    default_thinking: bool = knob(True, "Whether to think when a request does not say.")
    max_active: int = knob(0, "Most running requests per rank; 0 takes max_num_seqs.", ge=0)
    max_queue: int = knob(0, "Most waiting requests per rank; 0 takes four times max_active.", ge=0)
    max_body_bytes: int = knob(32 * 2**20, "Largest request body.", unit="bytes", gt=0)
    max_tokens_limit: int = knob(393216, "Largest max_tokens a request may ask for.", unit="tokens", gt=0)
    reasoning_alias: bool = knob(False, "Send reasoning under the name `reasoning` as well.")
    lenient_tool_history: bool = knob(False, "Accept conversations whose tool calls and results do not match.")
    strict_max_tokens: bool = knob(False, "Refuse max_tokens beyond the context instead of clamping it.")
    request_timeout_s: float = knob(0.0, "Longest time for one request; 0 means no limit.", unit="s", ge=0)
    queue_timeout_s: float = knob(600.0, "Longest time a request may wait for its first step.", unit="s", gt=0)
    header_timeout_s: float = knob(30.0, "Longest time for the headers of a request to arrive.", unit="s", gt=0)
    write_timeout_s: float = knob(30.0, "Longest time a client may leave its answer unread.", unit="s", gt=0)
    ready_timeout_s: float = knob(1800.0, "Longest time until the first token can be generated.", unit="s", gt=0)
    grace_s: float = knob(30.0, "How long stop waits for running requests.", unit="s", ge=0)
    hang_timeout_s: float = knob(
        60.0,
        "A rank counts as hung when its step loop has not ticked for this long, or after 10 s when it does nothing at all.",
        unit="s",
        gt=0,
    )
    restart: str = knob("on-failure", "What to do when a rank dies.", choices=("on-failure", "never"))
    share_gpu: bool = knob(False, "Start even if another program uses the GPU.")
    metrics_compat: str = knob("vllm", "Other servers' metric names to offer as well, comma separated: vllm, sglang.")
    warm: str = knob("", "File of JSON lines (chat bodies or prompts) to prefill and pin before the server is ready.")
    splice_sampled_ids: bool = knob(True, "Give history that was generated here the token ids it was sampled with, so that prefixes match.")
    sampled_ids_mb: float = knob(64.0, "Memory for the token ids and reasoning of past answers.", unit="MB", gt=0)
    reattach_reasoning: bool = knob(False, "Restore reasoning that a client dropped from turns with tool calls.")
    rank_header: bool = knob(False, "Send the header X-DeepInfer-Rank.")
    debug_faults: bool = knob(False, "Offer POST /deepinfer/debug/fault. For tests only.")
    render_route: bool = knob(False, "Offer POST /deepinfer/render, which shows the exact prompt of a chat body.")
    docs: bool = knob(False, "Serve /docs and /openapi.json.")
    log_level: str = knob("info", "Least severe level that is logged.", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        check_knobs(self, "server")
        unknown = [name for name in self.metric_namespaces if name not in METRIC_NAMESPACES]
        if unknown:
            raise ConfigError(
                f"server.metrics_compat is {self.metrics_compat!r}", hint=f"names, comma separated: {', '.join(METRIC_NAMESPACES)}"
            )

    @property
    def metric_namespaces(self) -> list[str]:
        return _names(self.metrics_compat)

    @property
    def origins(self) -> list[str]:
        return _names(self.allow_origin)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
