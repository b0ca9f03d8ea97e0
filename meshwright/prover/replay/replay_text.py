"""Describes a replayed step, and where two runs part, as text for people. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.prover.replay.step_detail import SampleDetail, StepReplay

SHOWN_SAMPLES = 3
"""Samples that are shown, those with the largest loss."""
SHOWN_CHARACTERS = 160
SHOWN_PARAMETERS = 3
SHOWN_LAYERS = 40


def describe_replay(replay: StepReplay, run: str) -> str:
    """The step from top to bottom: its numbers, whether they are those of the record, layers, blocks and samples."""
    start = replay.checkpoint or "the initial state"
    scale = f"  loss scale {replay.loss_scale:g}" if replay.loss_scale is not None else ""
    skipped = "  update skipped" if replay.skipped else ""
    lines = [
        f"step {replay.step} of {run}, replayed from {start} on {replay.layout}",
        f"loss {replay.loss:.6f}  gradient norm {replay.grad_norm:.6g}  lr {replay.lr:.6g}  "
        f"{replay.tokens:,} valid targets{scale}{skipped}",
        compare_text(replay),
        *replay.notes,
    ]
    if replay.first_nonfinite:
        lines.append(f"not finite first in {replay.first_nonfinite}")
    lines += ["", *layer_table(replay), *block_table(replay), "", *sample_lines(replay, run)]
    return "\n".join(lines)


def compare_text(replay: StepReplay) -> str:
    """Whether the replay is bitwise equal to what the run recorded."""
    steps = f"steps {replay.first_step} to {replay.step}" if replay.first_step < replay.step else f"step {replay.step}"
    if replay.record is None:
        return "the run has no record of this step"
    if replay.equals_record:
        return f"bitwise equal to the record of {steps}"
    pairs = (f"{key} {now} (recorded {then})" for key, (now, then) in replay.differences.items())
    here = "; in this step " + ", ".join(pairs) if replay.differences else ""
    if not replay.deterministic:
        why = (
            "the run did not use deterministic algorithms (precision.deterministic), so that the last digits may differ"
        )
        return f"not bitwise equal to the record, from step {replay.parted_at} on{here}; {why}"
    return f"NOT equal to the record, from step {replay.parted_at} on{here}"


def layer_table(replay: StepReplay) -> list[str]:
    layers = list(replay.layers().items())
    rows = [("layer", "gradient norm", "weight norm", "update norm", "update / weight")]
    for name, (gradient, weight, update) in layers[:SHOWN_LAYERS]:
        share = f"{update / weight:.2e}" if weight else "-"
        rows.append((name, f"{gradient:.4g}", f"{weight:.4g}", f"{update:.4g}", share))
    highest = sorted(replay.parameters, key=lambda p: -p.gradient_norm)[:SHOWN_PARAMETERS]
    total = sum(p.gradient_norm**2 for p in replay.parameters)
    parts = (f"{p.name} ({p.gradient_norm**2 / total:.0%} of the squared norm)" for p in highest if total > 0)
    return [*table(rows), *more(layers), f"largest gradients: {', '.join(parts) or 'none'}"]


def block_table(replay: StepReplay) -> list[str]:
    blocks = [module for module in replay.modules if module.block]
    rows = [("output of block", "RMS", "largest", "not finite")]
    rows += [(b.name, f"{b.rms:.4g}", f"{b.largest:.4g}", f"{b.nonfinite:,}") for b in blocks[:SHOWN_LAYERS]]
    return ["", *table(rows), *more(blocks)] if blocks else []


def more(rows: Sequence[object]) -> list[str]:
    return [f"... and {len(rows) - SHOWN_LAYERS} more (--json lists all)"] if len(rows) > SHOWN_LAYERS else []


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of text in columns: the first one to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def sample_lines(replay: StepReplay, run: str) -> list[str]:
    """The samples with the largest loss, and the one to blame."""
    highest = sorted(replay.samples, key=lambda s: -s.loss if s.loss == s.loss else float("-inf"))[:SHOWN_SAMPLES]
    lines = [f"the {len(highest)} of {len(replay.samples)} samples with the largest loss before the update:"]
    lines += [describe_sample(sample) for sample in highest]
    if (culprit := replay.culprit) is not None:
        rest = [s for s in replay.samples if s.sample != culprit.sample and s.targets]
        without = sum(s.loss * s.targets for s in rest) / max(1, sum(s.targets for s in rest))
        lines.append(
            f"sample {culprit.sample} stands out: without it the mean loss of the samples is {without:.4f}; "
            f"meshwright data find {run} --sample {culprit.sample} lists where it is read"
        )
    else:
        lines.append("no sample stands out")
    return lines


def describe_sample(sample: SampleDetail) -> str:
    text = " ".join(sample.text.split())
    shown = text[:SHOWN_CHARACTERS] + ("..." if len(text) > SHOWN_CHARACTERS else "")
    return (
        f"  sample {sample.sample} (index {sample.index} of {sample.source})  loss {sample.loss:.4f}  {shown}".rstrip()
    )
