"""Which tensors of a folder store which parameters of a model, checked by name, shape and dtype. Torch-free."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from meshwright.base.config import ModelConfig
from meshwright.base.config.reader import shorten
from meshwright.base.models.huggingface import StoredParameter
from meshwright.base.models.registry import model_spec, read_huggingface_model, stored_parameters
from meshwright.core.weights.content import EXPONENTS, folder_digest, tensor_digests
from meshwright.core.weights.folder import WeightFiles
from meshwright.errors import ConfigError

NamedTensors = Iterable[tuple[tuple[str, ...], "ExpectedTensor"]]
"""The tensors of a model, each with all of its names."""
INERT = re.compile(r"(.+\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")
"""Buffers that older versions of transformers stored, and that a model computes by itself."""


@dataclass(frozen=True)
class StoredLayout:
    """A tensor of a folder, and the parameters that it stores."""

    shape: tuple[int, ...]
    parts: tuple[StoredParameter, ...]


@dataclass(frozen=True)
class ExpectedTensor:
    """A parameter or buffer of a model that a folder should have."""

    shape: tuple[int, ...]
    floating: bool = True
    """whether it has floating-point numbers"""


@dataclass(frozen=True)
class StoredModel:
    """The parameters of a model in a folder."""

    parameters: dict[str, tuple[StoredParameter, ...]]
    """parameter -> the tensors that store it: one, or one for each expert"""
    equal: dict[str, str]
    """the tensor of a tied copy -> the tensor that it must be equal to"""


def stored_layouts(config: ModelConfig) -> dict[str, StoredLayout]:
    """Stored name -> the tensor, of all tensors of a family's Hugging Face folder."""
    shapes = {parameter.name: parameter.shape for parameter in model_spec(config).parameters}
    parts: dict[str, list[StoredParameter]] = defaultdict(list)
    for part in stored_parameters(config):
        parts[part.stored].append(part)
    layouts = {}
    for stored, of_tensor in parts.items():
        first = of_tensor[0]
        shape = shapes[first.name] if first.expert is None else shapes[first.name][1:]
        if first.rows is not None:
            shape = (max(part.rows[1] for part in of_tensor if part.rows is not None), *shape[1:])
        layouts[stored] = StoredLayout(shape[::-1] if first.transposed else shape, tuple(of_tensor))
    return layouts


def find_family_parameters(files: WeightFiles, config: ModelConfig) -> StoredModel:
    """The parameters of a family in a Hugging Face folder."""
    layouts = stored_layouts(config)
    renamed = names_in_folder(files, layouts)
    parameters: dict[str, list[StoredParameter]] = defaultdict(list)
    for stored, layout in layouts.items():
        for part in layout.parts:
            parameters[part.name].append(replace(part, stored=renamed[stored]))
    equal = {}
    if config.tie:
        untied = {part.name: part.stored for part in stored_parameters(replace(config, tie=False))}
        owners = {untied[copy]: parameters[owner][0].stored for copy, owner in model_spec(config).tied.items()}
        equal = {copy: owner for copy, owner in owners.items() if copy in files.tensors}
    check_tensors(files, {renamed[stored]: ExpectedTensor(layout.shape) for stored, layout in layouts.items()}, equal)
    return StoredModel({name: tuple(parts) for name, parts in parameters.items()}, equal)


def names_in_folder(files: WeightFiles, layouts: Iterable[str]) -> dict[str, str]:
    """Stored name -> its name in this folder: a model without its head is stored without a prefix such as "model."."""
    names = {stored: stored for stored in layouts}
    for stored in names:
        rest = stored.partition(".")[2]
        if stored not in files.tensors and rest in files.tensors:
            names[stored] = rest
    return names


def find_own_parameters(files: WeightFiles, tensors: NamedTensors, optional: frozenset[str]) -> StoredModel:
    """The tensors of a model by its own names; a tied one has several. `optional` ones may be absent."""
    parameters: dict[str, tuple[StoredParameter, ...]] = {}
    equal: dict[str, str] = {}
    expected = {}
    for names, tensor in tensors:
        present = [name for name in names if name in files.tensors]
        if not present and names[0] in optional:
            continue
        stored = (present or names)[0]
        expected[stored] = tensor
        parameters |= {name: (StoredParameter(name, stored),) for name in names}
        equal |= dict.fromkeys(present[1:], stored)
    check_tensors(files, expected, equal)
    return StoredModel(parameters, equal)


def check_tensors(files: WeightFiles, expected: Mapping[str, ExpectedTensor], equal: Mapping[str, str]) -> None:
    """Raises ConfigError unless the folder has the expected tensors, with their shapes, and no unknown one."""
    found = files.tensors
    if missing := [name for name in expected if name not in found]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"{files.root} lacks tensor {shorten(missing[0])}{more} of the model",
            "expected the weights of a model with the sizes of the config",
        )
    for name in (*expected, *equal):
        tensor, wanted = found[name], expected[equal.get(name, name)]
        if tensor.shape != tuple(wanted.shape):
            raise ConfigError(
                f"{tensor.file}: tensor {shorten(name)} is {tensor}", f"expected the shape {list(wanted.shape)}"
            )
        if (tensor.dtype in EXPONENTS) != wanted.floating:
            kinds = ", ".join(EXPONENTS) if wanted.floating else "integers"
            raise ConfigError(f"{tensor.file}: tensor {shorten(name)} is {tensor}", f"expected {kinds}")
    if unknown := [name for name in found if name not in expected and name not in equal and not INERT.fullmatch(name)]:
        raise ConfigError(
            f"{found[unknown[0]].file} has tensor {shorten(unknown[0])}, for which the model has no parameter",
            "expected the weights of a model with the sizes of the config",
        )


def find_parameters(files: WeightFiles, model: ModelConfig | None, tensors: NamedTensors | None) -> StoredModel:
    """The parameters of a custom model's `tensors`, of the family of the folder's config.json, or of `model`."""
    if tensors is not None:
        return find_own_parameters(files, tensors, frozenset())
    if files.has_config:
        return find_family_parameters(files, read_huggingface_model(files.config_fields()))
    if model is None:
        raise ConfigError(f"{files.root} has no config.json", "expected the folder of a Hugging Face model")
    spec = model_spec(model)
    own = [((parameter.name,), ExpectedTensor(parameter.shape)) for parameter in spec.parameters]
    buffers = [((buffer.name,), ExpectedTensor(buffer.shape)) for buffer in spec.buffers]
    return find_own_parameters(files, [*own, *buffers], frozenset(buffer.name for buffer in spec.buffers))


def checked_digest(files: WeightFiles, stored: StoredModel) -> str:
    """One digest of all tensors. Raises ConfigError for numbers that are not finite, for damage that the record of an
    export shows, and for copies of a tied weight that differ.
    """
    digests = tensor_digests(files)
    for copy, owner in stored.equal.items():
        one, other = files.tensors[copy], files.tensors[owner]
        if digests[copy] != digests[owner] or one.dtype != other.dtype:
            raise ConfigError(
                f"{one.file}: tensor {shorten(copy)} differs from {shorten(owner)}, to which the model ties it",
                "expected equal tensors, or tie_word_embeddings = false in config.json",
            )
    return folder_digest(files, digests)
