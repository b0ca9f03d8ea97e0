"""Attention within packed documents and windows, against a mask of full sequences: errors, time and peak memory.

    python -m benchmarks.packed_attention [--device cuda] [--sequence 8192]

Errors are relative to the definition in float64 on CPU, at a quarter of the length. Time and memory are those of
forward and backward of one attention with 32 query and 8 key heads of size 128. On CPU only allocated tensors of the
masked attention are known, and memory is not printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.models.layers.attention import CoreAttention

HEADS, KEY_HEADS, SIZE = 32, 8, 128
MEAN_DOCUMENT = 700
WINDOW = 1024
CASES: dict[str, tuple[bool, int | None]] = {
    "documents": (True, None),
    "window": (False, WINDOW),
    "documents and window": (True, WINDOW),
}
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed_attention", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sequence", type=int, default=8192 if torch.cuda.is_available() else 2048)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    device = torch.device(args.device)
    result: dict[str, Any] = {"torch": torch.__version__, "device": device_name(device), "sequence": args.sequence}
    for name, (packed, window) in CASES.items():
        result[name] = {
            "errors": errors(args.sequence // 4, packed, window, device),
            "costs": costs(args.sequence, packed, window, device, args.rounds),
        }
    print(json.dumps(result, indent=1))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def make_inputs(tokens: int, packed: bool, batch: int) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v and the gradient of the output, in float64 on CPU, and the documents."""
    generator = torch.Generator().manual_seed(tokens)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    tensors = [torch.randn(batch, n, tokens, SIZE, generator=generator, dtype=torch.float64) for n in heads]
    starts = torch.rand(batch, tokens, generator=generator) < 1 / MEAN_DOCUMENT
    return tensors, starts.long().cumsum(1) if packed else None


def masked_attention(window: int | None, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """torch's attention with a mask of full sequences."""
    positions = torch.arange(q.shape[2], device=q.device)
    visible = positions <= positions[:, None]
    if window is not None:
        visible &= positions > positions[:, None] - window
    if documents is not None:
        visible = (visible & (documents[:, :, None] == documents[:, None, :]))[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


def run(attend: Attend, tensors: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    """Output, dq, dk and dv."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in tensors[:3])
    out = attend(q, k, v, documents)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def errors(tokens: int, packed: bool, window: int | None, device: torch.device) -> dict[str, dict[str, float]]:
    """The largest error relative to the largest value, of our attention and of the masked one, by dtype."""
    tensors, documents = make_inputs(tokens, packed, 1)
    exact = run(partial(masked_attention, window), tensors, documents)
    found: dict[str, dict[str, float]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        local = [tensor.to(device, dtype) for tensor in tensors]
        on_device = None if documents is None else documents.to(device)
        attentions: dict[str, Attend] = {
            "ours": CoreAttention(window),
            "masked": partial(masked_attention, window),
        }
        found[str(dtype).removeprefix("torch.")] = {
            name: max(
                float((one.cpu().double() - other).abs().max() / other.abs().max())
                for one, other in zip(run(attend, local, on_device), exact, strict=True)
            )
            for name, attend in attentions.items()
        }
    return found


def costs(tokens: int, packed: bool, window: int | None, device: torch.device, rounds: int) -> dict[str, Any]:
    """Median milliseconds, and on CUDA the peak of memory above the inputs, in MiB, in bfloat16."""
    tensors, documents = make_inputs(tokens, packed, 1)
    local = [tensor.to(device, torch.bfloat16) for tensor in tensors]
    on_device = None if documents is None else documents.to(device)
    attentions: dict[str, Attend] = {
        "ours": CoreAttention(window),
        "masked": partial(masked_attention, window),
        "causal alone": CoreAttention(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in attentions}
    peaks: dict[str, float] = {}
    for _ in range(rounds + 1):
        for name, attend in attentions.items():
            given = None if name == "causal alone" else on_device
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            run(attend, local, given)
            if device.type == "cuda":
                torch.cuda.synchronize()
                peaks[name] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
            seconds[name].append(time.perf_counter() - start)
    milliseconds = {name: round(1e3 * statistics.median(values[1:]), 3) for name, values in seconds.items()}
    return {"milliseconds": milliseconds, "peak_mib": peaks}


if __name__ == "__main__":
    main()
