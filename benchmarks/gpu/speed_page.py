"""Writes the tables of docs/speed.md from the JSON of a benchmark, so that no figure of the page is typed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.ceilings import utilization
from benchmarks.gpu.shapes import SHAPES

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "speed.md", ROOT / "benchmarks" / "results" / "gpu.json"
BLOCK = re.compile(r"(<!-- (\w+): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)
Result = dict[str, Any]
Row = dict[str, Any]
CONTENDERS = ("best", "eager", "accelerate", "accelerate-regional", "accelerate-compiled", "lightning")


def write_page(result: Result) -> None:
    """Stores a result as the one that the page shows, and writes the tables of the page."""
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(render(PAGE.read_text(), result))


def render(page: str, result: Result) -> str:
    """The page with every block that is marked `<!-- NAME: begin -->` written from the result."""
    return BLOCK.sub(lambda match: match[1] + BLOCKS[match[2]](result) + match[3], page)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table, or a line that says that nothing of it was measured."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    if not lines:
        return "Not measured yet.\n"
    columns = list(head)
    return "\n".join([f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *lines]) + "\n"


def rows_of(result: Result, names: Iterable[str] | None = None) -> Iterator[Row]:
    """The rows that were measured, in the order of `names`."""
    measured = [row for row in result["rows"] if "error" not in row]
    for name in names if names is not None else dict.fromkeys(row["row"] for row in measured):
        yield from (row for row in measured if row["row"] == name)


def machine(result: Result) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items() if version)
    ceilings = result.get("ceilings", {})
    lines = [
        f"Measured on {result['date']} on one {result['device']} ({result['memory_gib']} GiB) with {packages}, "
        f"CUDA {result['cuda']}, cuDNN {result['cudnn']} and Python {result['python']}."
    ]
    if sustained := ceilings.get("matmul_sustained_tflops"):
        burst = ceilings.get("matmul_burst_tflops")
        lines.append(
            f"A bfloat16 product of matrices of {ceilings['matmul_size']} x {ceilings['matmul_size']} reaches "
            f"{f'{burst:.0f} TFLOP/s in a burst and ' if burst else ''}{sustained:.0f} TFLOP/s sustained at the power "
            f"limit of the card; the datasheet says {ceilings['datasheet_tflops']:.0f}."
        )
    return "\n".join(lines) + "\n"


def throughput(result: Result) -> str:
    """Meshwright and every contender by model."""

    def cells(model: str, side: Row, ratio: str, rounds: int | str, targets: list[Row]) -> list[Any]:
        use = utilization(side["tflops"], result.get("ceilings", {}))
        return [
            model,
            side["title"],
            f"{side['step_ms']:.1f}",
            f"{side['tokens_per_second']:,}",
            f"{side['tflops']:.0f}",
            f"{use['datasheet']:.1%}" if "datasheet" in use else "",
            f"{use['sustained']:.1%}" if "sustained" in use else "",
            f"{side['peak_gib']:.1f}",
            ratio,
            rounds,
            describe_targets(targets),
        ]

    rows = []
    for model in SHAPES:
        measured = [row for row in rows_of(result, CONTENDERS) if row["model"] == model]
        if measured:
            rows.append(cells(f"**{model}**", measured[0]["first"], "", "", []))
        for row in measured:
            rows.append(cells(model, row["second"], describe_ratio(row["ratio"]), row.get("rounds", 1), row["targets"]))
    head = ("model", "loop", "ms per step", "tokens/s", "TFLOP/s", "MFU, datasheet", "MFU, sustained", "peak GiB")
    return table((*head, "Meshwright / it", "rounds", "targets"), rows)


def settings(result: Result) -> str:
    """Rows in which one side is a setting of Meshwright, or a model handed to it."""
    names = [name for name in dict.fromkeys(row["row"] for row in rows_of(result)) if name not in CONTENDERS]
    rows = [
        [
            row["model"],
            row["first"]["title"],
            f"{row['first']['step_ms']:.1f}",
            f"{row['first']['peak_gib']:.1f}",
            row["second"]["title"],
            f"{row['second']['step_ms']:.1f}",
            f"{row['second']['peak_gib']:.1f}",
            describe_ratio(row["ratio"]),
            row["rounds"],
            describe_targets(row["targets"]),
        ]
        for row in rows_of(result, names)
        if "ratio" in row
    ]
    head = ("model", "first", "ms", "GiB", "second", "ms", "GiB", "speed, first / second", "rounds", "targets")
    return table(head, rows)


def numerics(result: Result) -> str:
    rows = [
        [row["model"], name, f"{found['loss']:.1e}", f"{found['gradient']:.1e}", f"{found['tolerance']['gradient']:g}"]
        for row in rows_of(result, ("numerics",))
        for name, found in row["models"].items()
        if "skipped" not in found
    ]
    return table(("model", "computed by", "loss", "gradient", "tolerance of the gradient"), rows)


def predictions(result: Result) -> str:
    """What the planner predicts for every run of Meshwright that was measured, and the largest errors."""
    rows, errors = {}, []
    for row in rows_of(result):
        for side in (row.get("first", {}), row.get("second", {})):
            if (key := (row["model"], side.get("title"))) in rows or not (predicted := side.get("predicted")):
                continue
            time, memory = side["step_ms"], side["peak_gib_of_steps"]
            errors.append((predicted["step_ms"] / time - 1, predicted["peak_gib"] / memory - 1))
            rows[key] = [
                *key,
                f"{predicted['step_ms']:.1f}",
                f"{time:.1f}",
                f"{errors[-1][0]:+.1%}",
                f"{predicted['peak_gib']:.1f}",
                f"{memory:.1f}",
                f"{errors[-1][1]:+.1%}",
            ]
    head = ("model", "run", "predicted ms", "measured ms", "error", "predicted GiB", "measured GiB", "error")
    if not errors:
        return table(head, [])
    largest = (max(map(abs, column)) for column in zip(*errors, strict=True))
    summary = (
        "The largest errors are {:.1%} of step time (target: 8 %) and {:.1%} of peak memory (target: 5 %).".format(
            *largest
        )
    )
    return f"{table(head, rows.values())}\n{summary}\n"


def checkpoint(result: Result) -> str:
    rows: list[list[str]] = []
    for row in rows_of(result, ("checkpoint",)):
        own, peers = row["meshwright"], row["peers"]
        rows += [
            ["state", f"{own['bytes'] / 1e9:.1f} GB", ""],
            ["steps are delayed by, in all", f"{own['stall_seconds'] * 1e3:.0f} ms", target_of(row, "stall, s")],
            ["step time while it is written", f"{own['slowdown']:.3f} x", target_of(row, "step time meanwhile")],
            ["published durably after", f"{own['published_after_seconds']:.1f} s", ""],
            [
                "relative to a plain fsynced write",
                f"{row['write_ratio']:.2f} x",
                target_of(row, "write rate / plain write"),
            ],
            [
                "restored with verification at",
                f"{own['restore_gb_per_second']:.1f} GB/s",
                target_of(row, "restore, GB/s"),
            ],
            [f"torch.save of {peers['bytes'] / 1e9:.1f} GB stalls for", f"{peers['torch_save_seconds']:.1f} s", ""],
            [
                f"DCP's async_save of {peers['bytes'] / 1e9:.1f} GB stalls for",
                f"{peers['dcp_async_save_stall_seconds']:.1f} s",
                "",
            ],
        ]
    return table(("quantity", "value", "target"), rows)


def start(result: Result) -> str:
    rows = [
        [
            row["model"],
            label,
            f"{times['build_seconds']:.1f}",
            f"{times['first_step_seconds']:.1f}",
            f"{times['process_seconds']:.1f}",
        ]
        for row in rows_of(result, ("start",))
        for label, times in (("empty", row["cold"]), ("after kill -9", row["restarted"]), ("full", row["warm"]))
    ]
    return table(("model", "compile cache", "build, s", "first step, s", "whole process, s"), rows)


def loading(result: Result) -> str:
    shares = {}
    for row in rows_of(result, CONTENDERS):
        if (share := row["first"].get("fetch_and_copy_share")) is not None:
            shares[row["model"]] = share
    return table(("model", "fetch and copy, share of the step"), [[m, f"{s:.2%}"] for m, s in sorted(shares.items())])


def describe_ratio(ratio: Row) -> str:
    low, high = ratio.get("range", (ratio["median"],) * 2)
    return (
        f"**{ratio['median']:.2f}** ({low:.2f} to {high:.2f})" if high - low >= 0.01 else f"**{ratio['median']:.3f}**"
    )


def describe_targets(targets: list[Row]) -> str:
    return ", ".join(
        f"{t['quantity']} {t['target']}: {'met' if t['met'] else 'missed'}"
        + (f" ({t['value']:.2f})" if " / " in t["quantity"] else "")
        for t in targets
    )


def target_of(row: Row, quantity: str) -> str:
    found = next(t for t in row["targets"] if t["quantity"] == quantity)
    return f"{found['target']}: {'met' if found['met'] else 'missed'}"


BLOCKS = {
    "machine": machine,
    "throughput": throughput,
    "settings": settings,
    "numerics": numerics,
    "predictions": predictions,
    "checkpoint": checkpoint,
    "start": start,
    "loading": loading,
}
"""The blocks of the page."""
