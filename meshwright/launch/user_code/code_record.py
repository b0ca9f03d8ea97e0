"""The code of a custom model as identity.json records it: its structure, its classes, its loss and its data."""

from __future__ import annotations

import re
import sys
from typing import Any

from torch import Tensor, nn

from meshwright.config import fingerprint
from meshwright.launch.user_code.code_fingerprint import CodeFingerprint, plain_attributes, plain_text, qualified_name
from meshwright.launch.user_code.user_code import UserCode
from meshwright.trainer.custom_model import CodeRecord

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address of an object in its repr, which differs in every process."""
POSITIONS = ("layer_idx", "layer_index")
"""Attributes with which a block knows its position in the list of blocks; its name says it as well."""


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
    """Adds the classes of a module tree, and returns its structure, one line per module."""
    for module in root.modules():
        code.add(type(module))
        for value in (*vars(module).values(), *module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            code.follow(value)
    to_dict = getattr(getattr(root, "config", None), "to_dict", dict)  # a model of transformers
    settings: dict[str, Any] = to_dict()
    return [
        *(f"{name}: {text}" for name, text in describe_tree(root, root_name, {})),
        *(f"{root_name}.config.{key}: {plain_text(value)}" for key, value in sorted(settings.items())),
    ]


def describe_tree(module: nn.Module, name: str, known: dict[int, str]) -> list[tuple[str, str]]:
    """The (name, description) of a module and of all modules inside it. Consecutive children of equal structure share
    their lines, as in `print(model)`: `model.layers.0-31.act`. `known` has the names of what was described before.
    """
    if id(module) in known:
        return [(name, f"the same module as {known[id(module)]}")]
    known[id(module)] = name
    lines = [(name, describe_module(module, name, known))]
    groups: list[tuple[str, str, list[tuple[str, str]]]] = []
    for child_name, child in module._modules.items():
        if child is None:
            continue
        full_name = f"{name}.{child_name}"
        tree = [(line.removeprefix(full_name), text) for line, text in describe_tree(child, full_name, known)]
        if groups and groups[-1][2] == tree and child_name.isdecimal():
            groups[-1] = (groups[-1][0], child_name, tree)
        else:
            groups.append((child_name, child_name, tree))
    for first, last, tree in groups:
        children = first if first == last else f"{first}-{last}"
        lines += [(f"{name}.{children}{line}", text) for line, text in tree]
    return lines


def describe_module(module: nn.Module, name: str, known: dict[int, str]) -> str:
    """The class, settings, parameters and buffers of a module, without those of its children."""
    shown = ADDRESS.sub("", " ".join(module.extra_repr().split()))
    attributes = [text for text in plain_attributes(module) if text.partition("=")[0] not in POSITIONS]
    hidden = [text for text in attributes if text != "training=True" and text not in shown.split(", ")]
    tensors = (*module._parameters.items(), *module._buffers.items())
    described = [describe_tensor(key, t, f"{name}.{key}", known) for key, t in tensors if t is not None]
    return " ".join([f"{type(module).__name__}({', '.join(filter(None, [shown, *hidden]))})", *described])


def describe_tensor(key: str, tensor: Tensor, name: str, known: dict[int, str]) -> str:
    if id(tensor) in known:
        return f"{key} = {known[id(tensor)]}"
    known[id(tensor)] = name
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " frozen"
    return f"{key}{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen}"
