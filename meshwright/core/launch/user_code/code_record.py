"""The code of a custom model as identity.json records it: its structure, its classes, its loss and its data."""

from __future__ import annotations

import re
import sys
from typing import Any

from torch import Tensor, nn

from meshwright.base.config import fingerprint
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.launch.user_code.code_fingerprint import (
    CodeFingerprint,
    CodeParts,
    constant_buffers,
    is_setting,
    plain_text,
    qualified_name,
)
from meshwright.core.launch.user_code.object_state import tensor_text
from meshwright.core.trainer.custom_model import CodeRecord

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address of an object in its repr, which differs in every process."""
POSITIONS = ("layer_idx", "layer_index")
"""Attributes with which a block knows its position in the list of blocks; its name says it as well."""


def build_code_record(module: nn.Module, user: UserCode, source: Any = None) -> CodeRecord:
    """Fingerprints a model, its loss, and the functions and dataset beside them. Metrics do not change the model, and a
    ParallelSpec is placement.
    """
    code = CodeFingerprint()
    if source is not None:
        code.known[id(source)] = "source"  # its samples count, and its attributes are mostly paths
    modules = {"model": module} | ({"loss": user.loss} if isinstance(user.loss, nn.Module) else {})
    for root in modules.values():
        add_module_code(code, root)
    functions = {"loss": user.loss, "collate": user.collate, "init": user.init}
    for name, value in (functions | training_functions(user)).items():
        if value is not None and name not in modules:
            code.add(value, name)
    structure = [line for name, root in modules.items() for line in describe_model(code, root, name)]
    code.describe_values()
    if source is not None:
        code.text_counts = False
        code.add(type(source), "source")
        for value in getattr(source, "__dict__", {}).values():
            code.follow(value)
        code.describe_values()
    return make_record(qualified_name(type(module)), code.parts | {"reduction": str(user.reduction)}, structure)


def build_update_record(user: UserCode) -> CodeRecord:
    """Fingerprints an optimizer, a schedule and a reward of the user's that train a built-in model."""
    code = CodeFingerprint()
    for name, value in training_functions(user).items():
        if value is not None:
            code.add(value, name)
    code.describe_values()
    return make_record("", code.parts, [])


def training_functions(user: UserCode) -> dict[str, Any]:
    """What a user brings beside a model: its code counts for built-in models, too."""
    return {"optimizer": user.optimizer, "schedule": user.schedule, "reward": user.reward}


def make_record(name: str, parts: CodeParts, structure: list[str]) -> CodeRecord:
    return {
        "class": name,
        "fingerprint": fingerprint({"parts": parts, "structure": structure}),
        "python": ".".join(map(str, sys.version_info[:2])),
        "parts": parts,
        "structure": structure,
    }


def add_module_code(code: CodeFingerprint, root: nn.Module) -> None:
    """Adds the classes of a module tree, and the functions that its modules refer to."""
    for module in root.modules():
        code.follow(type(module))
        for value in (*vars(module).values(), *module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if callable(value):
                code.follow(value)


def describe_model(code: CodeFingerprint, root: nn.Module, root_name: str) -> list[str]:
    """The structure of a module tree, one line per module, and its settings."""
    to_dict = getattr(getattr(root, "config", None), "to_dict", dict)  # a model of transformers
    settings: dict[str, Any] = to_dict()
    return [
        *(f"{name}: {text}" for name, text in describe_tree(code, root, root_name)),
        *(f"{root_name}.config.{key}: {plain_text(value)}" for key, value in sorted(settings.items())),
    ]


def describe_tree(code: CodeFingerprint, module: nn.Module, name: str) -> list[tuple[str, str]]:
    """The (name, description) of a module, of its settings, and of all modules inside it. Consecutive children of equal
    structure share their lines, as in `print(model)`: `model.layers.0-31.act`.
    """
    if id(module) in code.known:
        return [(name, f"the same module as {code.known[id(module)]}")]
    code.known[id(module)] = name
    lines = describe_module(code, module, name)
    groups: list[tuple[str, str, list[tuple[str, str]]]] = []
    for child_name, child in module._modules.items():
        if child is None:
            continue
        full_name = f"{name}.{child_name}"
        tree = [(line.removeprefix(full_name), text) for line, text in describe_tree(code, child, full_name)]
        if groups and groups[-1][2] == tree and child_name.isdecimal():
            groups[-1] = (groups[-1][0], child_name, tree)
        else:
            groups.append((child_name, child_name, tree))
    for first, last, tree in groups:
        children = first if first == last else f"{first}-{last}"
        lines += [(f"{name}.{children}{line}", text) for line, text in tree]
    return lines


def describe_module(code: CodeFingerprint, module: nn.Module, name: str) -> list[tuple[str, str]]:
    """The class, settings, parameters and buffers of a module in one line, and a line for every value inside settings
    that are objects. Its children are not described.
    """
    shown = ADDRESS.sub("", " ".join(module.extra_repr().split()))
    attributes = {key: value for key, value in code.attributes(module).items() if key not in POSITIONS}
    settings = [f"{key}={plain_text(value)}" for key, value in attributes.items() if is_setting(value)]
    hidden = [text for text in settings if text != "training=True" and text not in shown.split(", ")]
    constant = constant_buffers(module)
    tensors = (*module._parameters.items(), *module._buffers.items())
    described = [describe_tensor(code, key, t, f"{name}.{key}", key in constant) for key, t in tensors if t is not None]
    line = " ".join([f"{type(module).__name__}({', '.join(filter(None, [shown, *hidden]))})", *described])
    objects = [(key, value) for key, value in attributes.items() if not is_setting(value)]
    return [(name, line), *(found for key, value in objects for found in code.lines(value, f"{name}.{key}"))]


def describe_tensor(code: CodeFingerprint, key: str, tensor: Tensor, name: str, with_values: bool) -> str:
    if id(tensor) in code.known:
        return f"{key} = {code.known[id(tensor)]}"
    code.known[id(tensor)] = name
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " frozen"
    return f"{key}{tensor_text(tensor, with_values)}{frozen}"
