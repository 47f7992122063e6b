"""The records of a run as a table of text cells: for the terminal, for a log and for `docs/`."""

from __future__ import annotations

from typing import Any

from deepinfer_cli.units import show_number

HEADS = ("case", "time us", "a/a %", "reached", "of", "must", "aim", "level", "error", "best peer", "x peer")


def rows(records: list[dict[str, Any]]) -> list[list[str]]:
    """One row of cells per record, in the order of `HEADS`."""
    return [_row(record) for record in records]


def ceilings_line(record: dict[str, Any]) -> str:
    """The ceilings of the run in one line."""
    names = {"copy_tbs": "copy {:.3g} TB/s", "bf16_tflops": "bf16 {:.3g} TFLOP/s", "fp8_tflops": "fp8 {:.4g} TFLOP/s"}
    names |= {"h2d_gbs": "up {:.3g} GB/s", "d2h_gbs": "down {:.3g} GB/s"}
    return " · ".join(text.format(record["ceilings"][key]) for key, text in names.items() if record["ceilings"].get(key) is not None)


def plain_text(records: list[dict[str, Any]]) -> str:
    """The table with padded columns, where no terminal library is installed."""
    cells = [list(HEADS), *rows(records)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEADS))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))) for row in cells]
    return "\n".join([ceilings_line(records[0]), *lines]) if records else "nothing was measured"


def markdown(records: list[dict[str, Any]]) -> str:
    """The same table for a page of `docs/`."""
    head = "| " + " | ".join(HEADS) + " |\n|" + "---|" * len(HEADS)
    return "\n".join([head, *("| " + " | ".join(row) + " |" for row in rows(records))])


def _row(record: dict[str, Any]) -> list[str]:
    params = " ".join(f"{key}={_short(value)}" for key, value in record["params"].items())
    error = record.get("error", {})
    if "time_us" not in record:
        says = error.get("message") or f"error {error.get('rel'):.1e} over {error.get('limit'):.1e}"
        return [f"{record['id']} {params}", "–", "–", "–", "–", "–", "–", str(record["level"]), says[:80], "–", "–"]
    share, peer = record["share"], record.get("peer")
    digits = 1 if share["of"] == "time" else 2
    return [
        f"{record['id']} {params}",
        show_number(record["time_us"]["median"]) + ("*" if record["captured"] is False else ""),
        show_number(record["same_twice_spread"] * 100),
        show_number(share["value"], digits),
        share["of"],
        show_number(share["must"], digits),
        show_number(share["aim"], digits),
        record.get("level") or "–",
        f"{error['rel']:.1e}" if "rel" in error else "–",
        peer["name"] if peer else "–",
        show_number(peer["ratio"], 2) if peer else "–",
    ]


def _short(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
