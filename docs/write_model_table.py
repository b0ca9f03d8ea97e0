"""Writes the table of docs/models.md: what models that are not ours can do, each cell proven on this machine.

python docs/write_model_table.py                      all models on all layouts, which takes minutes
python docs/write_model_table.py Llama GPT-2          some models; prints their rows and writes nothing

Models are those of transformers and torchvision with small random configs. A cell is the largest relative error of any
loss, gradient or parameter of the training loop against the module in one plain process, or the reason of a refusal.
The last column is a run with ZeRO-3 whose rank 1 was killed with SIGKILL: after its restart it ends with the bits of a
run that was not killed, and its checkpoint loads bitwise with DDP.
"""

from __future__ import annotations

import argparse
import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright import train
from meshwright.base.config import BatchConfig, ContextConfig, EvalConfig, LaunchConfig, LayoutConfig, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.launch.user_code.make_custom_model import open_user_code
from meshwright.errors import ConfigError
from meshwright.prover.claims import fault_environment, proof_folder
from meshwright.prover.custom.proof import CustomProof
from meshwright.prover.custom.subject import Subject
from meshwright.prover.custom.training import execute_and_compare, prepare_custom
from meshwright.prover.shrink.custom_runs import custom_runs

PAGE = Path(__file__).parent / "models.md"
BEGIN, END = "<!-- table of models: begin -->", "<!-- table of models: end -->"
SEQUENCE, VOCABULARY, IMAGE = 8, 32, 16
REFUSED = re.compile("the run failed: (.*); (?:expected|try) ")
"""The failure of a run whose layout a rank refused: an error with a hint."""

LAYOUTS = {
    "DDP": LayoutConfig(replicate=2),
    "ZeRO-3": LayoutConfig(replicate=2, shard="parameters"),
    "HSDP": LayoutConfig(replicate=2, shard="parameters", shard_degree=2),
    "tensor": LayoutConfig(replicate=1, tensor=2),
    "pipeline": LayoutConfig(replicate=1, pipeline=2),
    "context": LayoutConfig(replicate=1, context=2),
    "expert": LayoutConfig(replicate=2, expert=2),
}


class Tokens:
    """Random token sequences; a sample depends only on its index."""

    def __init__(self, labels: Callable[[torch.Tensor], Any]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(0, VOCABULARY, (SEQUENCE,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": self.labels(tokens)}


class Images:
    """Random images with a class."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.randn(3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(index))
        return {self.name: image, "labels": index % 4}


def transformers_model(name: str, **settings: Any) -> nn.Module:
    """A model of transformers with a small random config."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Config", None)
    if config is None:
        config = getattr(transformers, name.split("For")[0] + "Config")
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 32}
    model: nn.Module = getattr(transformers, name)(config(**sizes | settings))
    return model


def causal(name: str, **settings: Any) -> UserCode:
    sizes = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "pad_token_id": None}
    return UserCode(model=transformers_model(name, **sizes | settings), source=Tokens(lambda tokens: tokens))


def sum_of_classes(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = getattr(outputs, "logits", outputs)
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="sum")


def torchvision_model(name: str) -> UserCode:
    """A model of torchvision. Its batch normalization is synchronized."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):  # a build of torchvision for another torch has no compiled operators
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    torch.manual_seed(0)
    settings = {"image_size": IMAGE, "patch_size": 4, "num_layers": 4, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    if name == "VisionTransformer":
        module = torchvision.models.VisionTransformer(**settings, num_classes=4)
    else:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(getattr(torchvision.models, name)(num_classes=4))
    argument = "x"
    return UserCode(model=module, loss=sum_of_classes, source=Images(argument))


MODELS: dict[str, Callable[[], UserCode]] = {
    "Llama": lambda: causal("LlamaForCausalLM"),
    "Qwen3": lambda: causal("Qwen3ForCausalLM", head_dim=4),
    "Mistral": lambda: causal("MistralForCausalLM", sliding_window=None),
    "Gemma 2": lambda: causal("Gemma2ForCausalLM", head_dim=4, sliding_window=4),
    "GPT-2": lambda: UserCode(
        model=transformers_model(
            "GPT2LMHeadModel",
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        source=Tokens(lambda tokens: tokens),
    ),
    "Mixtral": lambda: causal("MixtralForCausalLM", num_local_experts=4),
    "BERT": lambda: UserCode(
        model=transformers_model(
            "BertForMaskedLM",
            vocab_size=VOCABULARY,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        source=Tokens(lambda tokens: torch.where(tokens % 3 == 0, tokens, -100)),
    ),
    "ViT": lambda: UserCode(
        model=transformers_model("ViTForImageClassification", image_size=IMAGE, patch_size=4, num_labels=4),
        loss=sum_of_classes,
        source=Images("pixel_values"),
    ),
    "torchvision ResNet-18": lambda: torchvision_model("resnet18"),
    "torchvision ViT": lambda: torchvision_model("VisionTransformer"),
}


def config_for(layout: LayoutConfig) -> RunConfig:
    config = RunConfig(
        steps=3,
        layout=layout,
        batch=BatchConfig(global_=8, micro=2),
        context=ContextConfig(method="all-to-all"),
        eval=EvalConfig(every=2, holdout=0.2, samples=4),
        launch=LaunchConfig(device="cpu", collective_timeout=60.0),
    )
    return with_device_defaults(config, "cpu", own_model=True)


def prove_layout(user: UserCode, layout: LayoutConfig) -> str:
    """The largest relative error of a run on a layout, or why the layout is refused."""
    try:
        config, custom, sources = open_user_code(config_for(layout), user)
        assert custom is not None
        proof = CustomProof(config, Subject(custom, sources))
        if proof.refusal:
            return f"no: {proof.refusal}"
        facts = proof.facts
        runs = custom_runs(config, facts.float64)
        run = next((run for run in runs if run.config.precision.compute == "fp64"), runs[0])
        with proof_folder() as folder:
            claim, *_ = execute_and_compare(prepare_custom(run, proof.subject, facts, folder / "run"), proof.subject)
    except ConfigError as error:
        return f"no: {error.message}"
    if refused := REFUSED.match(claim.measured):
        return f"no: {refused[1]}"
    found = re.search(r"largest relative error (\S+)", claim.measured)
    if not claim.passed or found is None:
        return f"WRONG: {claim.measured}"
    return found[1] if facts.float64 else f"{found[1]} (float32)"


def prove_recovery(user: UserCode) -> str:
    """Whether a run that was killed ends with the bits of one that was not, and loads bitwise on another layout."""
    config, arguments = config_for(LAYOUTS["ZeRO-3"]), {"loss": user.loss, "source": user.source, "quiet": True}
    with proof_folder() as folder:
        undisturbed = train(config, model=copy.deepcopy(user.model), run=folder / "undisturbed", **arguments)
        with fault_environment("step.updated:rank1:kill@step1"):
            killed = train(config, model=copy.deepcopy(user.model), run=folder / "killed", **arguments)
        attempts = len(list((folder / "killed" / "attempts").iterdir()))
        moved_config = config_for(LAYOUTS["DDP"])
        moved = train(moved_config, model=copy.deepcopy(user.model), run=folder / "killed", **arguments)
    if attempts < 2:
        return "WRONG: the run was not killed"
    if not undisturbed.parameters_digest == killed.parameters_digest == moved.parameters_digest:
        return "WRONG: the digests differ"
    return "yes"


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    rows = []
    for name in names or MODELS:
        cells = {}
        for title, layout in LAYOUTS.items():
            cells[title] = prove_layout(MODELS[name](), layout)
            print(f"{name}, {title}: {cells[title]}", flush=True)
        recovery = prove_recovery(MODELS[name]())
        print(f"{name}, recovery: {recovery}", flush=True)
        rows.append([name, *(cells[title] for title in LAYOUTS), recovery])
    if not names:
        write(rows)


def write(rows: list[list[str]]) -> None:
    """Replaces the table between the markers of the page. Reasons of refusals are numbered below the table."""
    header = ["model", *LAYOUTS, "killed and resumed"]
    reasons = list(dict.fromkeys(cell for row in rows for cell in row if cell.startswith("no: ")))
    shown = [[f"no ({reasons.index(cell) + 1})" if cell in reasons else cell for cell in row] for row in rows]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in shown), ""]
    lines += [f"{number}. {reason.removeprefix('no: ')}" for number, reason in enumerate(reasons, 1)]
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    main(parser.parse_args().names)
