"""The code of a custom model as identity.json records it: its structure, its classes, its loss and its data."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any

from torch import Tensor, nn

from meshwright.config import fingerprint
from meshwright.launch.user_code.code_fingerprint import CodeFingerprint, plain_attributes, plain_text, qualified_name
from meshwright.launch.user_code.user_code import UserCode
from meshwright.trainer.custom_model import CodeRecord

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address of an object in its repr, which differs in every process."""


def build_code_record(module: nn.Module, user: UserCode, source: Any = None) -> CodeRecord:
    """Fingerprints a model, its loss, and the functions and dataset beside them. Metrics do not change the model, and a
    ParallelSpec is placement.
    """
    code = CodeFingerprint()
    structure = add_module(code, module, "model")
    if isinstance(user.loss, nn.Module):
        structure += add_module(code, user.loss, "loss")
    given = {"loss": user.loss, "collate": user.collate, "init": user.init}
    roles = {name: code.add(value) for name, value in given.items() if value is not None}
    if source is not None:
        code.text_counts = False
        roles["source"] = code.add(type(source))
        for value in getattr(source, "__dict__", {}).values():
            code.follow(value)
    parts = code.parts | roles | {"reduction": str(user.reduction)}
    python = ".".join(map(str, sys.version_info[:2]))
    return {
        "class": qualified_name(type(module)),
        "fingerprint": fingerprint({"parts": parts, "structure": structure}),
        "python": python,
        "parts": parts,
        "structure": structure,
    }


def add_module(code: CodeFingerprint, root: nn.Module, root_name: str) -> list[str]:
    """Adds the classes of a module tree, and returns its structure, one line per module. Blocks of equal structure
    share their lines: `model.layers.*.act: ReLU() x 32`.
    """
    lines: Counter[str] = Counter()
    for name, module in root.named_modules(remove_duplicate=False):
        code.add(type(module))
        for value in (*vars(module).values(), *module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            code.follow(value)
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", f"{root_name}.{name}" if name else root_name)
        lines[f"{pattern}: {describe_module(module)}"] += 1
    to_dict = getattr(getattr(root, "config", None), "to_dict", dict)  # a model of transformers
    settings: dict[str, Any] = to_dict()
    return [
        *(f"{line} x {count}" if count > 1 else line for line, count in lines.items()),
        *(f"{root_name}.config.{key}: {plain_text(value)}" for key, value in sorted(settings.items())),
    ]


def describe_module(module: nn.Module) -> str:
    """The class, settings, parameters and buffers of a module, without those of its children."""
    shown = ADDRESS.sub("", " ".join(module.extra_repr().split()))
    hidden = [text for text in plain_attributes(module) if text != "training=True" and text not in shown.split(", ")]
    tensors = [describe_tensor(name, tensor) for name, tensor in module._parameters.items() if tensor is not None]
    tensors += [describe_tensor(name, tensor) for name, tensor in module._buffers.items() if tensor is not None]
    return f"{type(module).__name__}({', '.join(filter(None, [shown, *hidden]))})" + "".join(f" {t}" for t in tensors)


def describe_tensor(name: str, tensor: Tensor) -> str:
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " frozen"
    return f"{name}{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen}"
