"""How a Hugging Face folder stores a model of a family: its config.json and the names of its tensors. Torch-free.

A family has a module `huggingface.py` with three functions:

    read_config(fields: ConfigFields) -> dict[str, Any]          the `[model]` section of a config.json
    write_config(config: ModelConfig, options) -> dict[str, Any] the config.json of a `[model]` section
    stored_parameters(config: ModelConfig, options) -> Iterator[StoredParameter]

The name of a family is the `model_type` of its config.json.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredParameter:
    """Where a Hugging Face folder stores a parameter of a family, or the matrix of one expert of it."""

    name: str
    """the parameter, as in the spec of the family"""
    stored: str
    """the tensor of the folder"""
    expert: int | None = None
    """the index in the first dimension of the parameter that the tensor stores; None: all of the parameter"""
    transposed: bool = False
    """whether the folder stores the transpose"""
    rows: tuple[int, int] | None = None
    """the rows [start, stop) of the tensor, after transposition, that store the parameter; None: all rows"""
