"""Compares the tensor- and expert-parallel plans that transformers ships with one process: loss and every gradient.

python -m benchmarks.transformers_plans --axis tensor
python -m benchmarks.transformers_plans --axis expert llama mixtral
python -m benchmarks.transformers_plans --implementation meshwright

Small random models in float64 on two CPU ranks. `transformers` applies a plan by transformers' own code, `meshwright`
by Meshwright's translation of it. One row per family: right, wrong with the worst parameter, or why it does not run.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshwright.core.parallel.infer_spec import infer_parallel_spec
from meshwright.core.parallel.tensor_parallel import apply_tensor_parallel, reduce_partial_gradients
from meshwright.core.parallel.world import World
from meshwright.testing import RanksFailed, run_ranks

RANKS, TOLERANCE = 2, 1e-9
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
LATENT |= {"kv_lora_rank": 16, "q_lora_rank": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LAYER_TYPES = {"layer_types": ["full_attention", "sliding_attention"]}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"], LATENT),
    **dict.fromkeys(["glm4_moe_lite", "longcat_flash", "minicpm3", "youtu", "hy_v4"], LATENT),
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gemma3n_text": LAYER_TYPES | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 96, "laurel_rank": 8},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["attention", "attention"]},
    "bailing_hybrid": {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1},
    "beam": {"mlp_layer_types": ["dense", "sparse"], "n_group": 2, "topk_group": 1},
    "flint": {"mlp_only_layers": []},
    "llama4_text": {"interleave_moe_layer_step": 1},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2_moe": {"layer_types": ["full_attention", "full_attention"], "num_dense_layers": 1},
}
"""Settings of families whose configs need more than SMALL."""

NOT_COMPARED = {
    "llama4": "its config makes a large vision tower; llama4_text is compared instead",
    "phi4_multimodal": "its config makes large vision and audio towers",
    "cohere_compass_text": "its config needs rotary settings for each type of layer",
}


@dataclass(frozen=True)
class Comparison:
    """One family on one axis against one process."""

    family: str
    verdict: str
    """right, wrong, or error"""
    detail: str = ""
    loss_error: float = 0.0
    gradient_error: float = 0.0
    """of the worst parameter: the largest difference divided by the largest element of the right gradient, or by a
    millionth of that of all gradients where the right one is zero but for rounding"""
    accumulated_error: float = 0.0
    """the same after a second backward pass that adds to the gradients"""


class KeepFloat64(TorchFunctionMode):
    """Models cast norms, softmax and rotary tables to float32; here these casts keep float64, so that equality of
    two computations is visible at 1e-9.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        to_double = {torch.float32: torch.float64}
        args = tuple(to_double.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
        kwargs = {k: to_double.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return function(*args, **kwargs)


def build(family: str) -> nn.Module:
    """A small model of the family with random values in every parameter, biases and norms included."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**(SMALL | OVERRIDES.get(family, {})))
    config._attn_implementation = config._experts_implementation = "eager"  # the others have no float64
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model  # type: ignore[no-any-return]


def tokens() -> Tensor:
    """Random tokens, among them the padding token and the first token of the second vocabulary shard."""
    ids = torch.randint(3, SMALL["vocab_size"], (2, 8), generator=torch.Generator().manual_seed(1))
    ids[:, 2], ids[:, 5] = 0, SMALL["vocab_size"] // RANKS
    return ids


def loss_and_gradients(
    model: nn.Module, passes: int, batch: dict[str, Tensor] | None = None
) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients after several backward passes that add up."""
    loss = torch.zeros(())
    arguments: dict[str, Any] = batch or {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    for _ in range(passes):
        with KeepFloat64():
            loss = model(**arguments).loss
        loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def parallel_model(model: nn.Module, implementation: str, axis: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    if implementation == "meshwright":
        apply_tensor_parallel(model, infer_parallel_spec(model), mesh)
        return model
    from transformers.distributed import DistributedConfig

    ways = {"tensor": {"tp_size": RANKS}, "expert": {"tp_size": RANKS, "ep_size": RANKS, "tp_plan": {}}}
    config, _, manager = model.prepare_distribute_model(DistributedConfig(**ways[axis]))  # type: ignore[operator]
    model = model.maybe_distribute_model(model, config, manager)  # type: ignore[operator]
    model.tie_weights()  # as from_pretrained does  # type: ignore[operator]
    return model


def compare_on_rank(_world: World, family: str, implementation: str, axis: str) -> dict[str, Any]:
    reference = build(family)
    expected_loss, expected = loss_and_gradients(copy.deepcopy(reference), 1)
    model = parallel_model(reference, implementation, axis)
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return asdict(Comparison(family, "error", "the plan shards no parameter of this small model"))
    values = {name: full(parameter) for name, parameter in model.named_parameters()}
    fresh = dict(build(family).named_parameters())
    for name, value in values.items():
        if not torch.equal(value, fresh[name]):
            return asdict(Comparison(family, "wrong", f"{name} does not have its values after sharding"))
    loss, gradients = loss_and_gradients(model, 1)
    first = {name: full(gradient).clone() for name, gradient in summed(model, gradients, implementation).items()}
    errors = relative_errors(first, expected)
    accumulated: dict[str, float] = {}
    if implementation == "transformers":
        _, gradients = loss_and_gradients(model, 1)
        twice = {name: full(gradient) for name, gradient in gradients.items()}
        accumulated = relative_errors(twice, {name: 2 * gradient for name, gradient in expected.items()})
    loss_error = abs(loss - expected_loss) / abs(expected_loss)
    wrong = sorted(name for name, error in errors.items() if error > TOLERANCE)
    twice_wrong = sorted(name for name, error in accumulated.items() if error > TOLERANCE)
    verdict = "wrong" if wrong or loss_error > TOLERANCE else "wrong when accumulated" if twice_wrong else "right"
    names, of = (wrong, errors) if wrong else (twice_wrong, accumulated)
    detail = f"{len(names)} of {len(errors)}: {', '.join(sorted({shorten(name) for name in names}))}" if names else ""
    if names:
        detail += f"; worst {max(names, key=lambda name: of[name])}"
    largest, twice = max(errors.values()), max(accumulated.values(), default=0.0)
    return asdict(Comparison(family, verdict, detail, loss_error, largest, twice))


def summed(model: nn.Module, gradients: dict[str, Tensor], implementation: str) -> dict[str, Tensor]:
    """Gradients as the optimizer sees them: Meshwright sums partial gradients at the end of a step."""
    if implementation == "meshwright":
        reduce_partial_gradients(model.parameters(), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",)))
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients


def full(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    errors = {}
    smallest = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        scale = gradient.abs().max().clamp_min(smallest)
        errors[name] = float((found[name] - gradient).abs().max() / scale) if name in found else float("inf")
    return errors


def shorten(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def compare(family: str, implementation: str, axis: str) -> Comparison:
    """The worst result of all ranks."""
    try:
        results = [
            Comparison(**r) for r in run_ranks(compare_on_rank, RANKS, family, implementation, axis, timeout=300)
        ]
    except RanksFailed as failed:
        return Comparison(family, "error", " ".join(str(failed.cause()).split())[:300])
    order = ["right", "wrong when accumulated", "wrong", "error"]
    return max(results, key=lambda result: (order.index(result.verdict), result.gradient_error))


def families(axis: str) -> Iterator[str]:
    """The families of causal language models with a plan for this axis."""
    plan = "base_model_tp_plan" if axis == "tensor" else "base_model_ep_plan"
    for family, config in transformers.CONFIG_MAPPING.items():
        causal = config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if getattr(config, plan, None) and causal and family not in NOT_COMPARED:
            yield family


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transformers_plans", description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--axis", choices=["tensor", "expert"], default="tensor")
    parser.add_argument("--implementation", choices=["transformers", "meshwright"], default="transformers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = []
    for family in args.families or families(args.axis):
        rows.append(compare(family, args.implementation, args.axis))
        row = rows[-1]
        sys.stdout.write(
            f"| {family} | {row.verdict} | {row.loss_error:.1e} | {row.gradient_error:.1e} "
            f"| {row.accumulated_error:.1e} | {row.detail} |\n"
        )
        sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
