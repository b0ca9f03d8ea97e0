"""Makes the CustomModel and opens the data of a verb from what the user passed to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.base.config import CustomModelConfig, RunConfig
from meshwright.base.config.run_config import ENTRY_POINT_KEYS
from meshwright.base.models.registry import validate_packing
from meshwright.base.topology.layout import Layout
from meshwright.base.user_code.entry_points import call_without_arguments
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.source import IndexableSource, Source, find_structure, is_packed
from meshwright.core.launch.first_batch_check import prepare_custom_model
from meshwright.core.launch.initial_weights import with_init_from_folder
from meshwright.core.launch.source_check import check_source
from meshwright.core.launch.user_code.code_record import build_code_record
from meshwright.core.launch.user_code.spec_from_forward import infer_spec_from_forward
from meshwright.core.parallel.infer_spec import describe_spec, infer_parallel_spec
from meshwright.core.parallel.parallelize import require_spec
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.errors import ConfigError, IdentityError


class UserRun(NamedTuple):
    """What a verb runs: a config that records the custom model, if there is one, and the data."""

    config: RunConfig
    custom: CustomModel | None
    sources: list[Source]


def open_user_code(config: RunConfig, user: UserCode, same_code: bool = True, needs_values: bool = True) -> UserRun:
    """Makes the user's model and opens the user's dataset, or the data of the config. All verbs call this.

    If the config comes from a run of a custom model, the user's code must be that of the run with `same_code`. Without
    `needs_values`, the model is not run on its first batch, and may be on the meta device.
    """
    require_source(config, user)
    require_no_lora(config, user)
    dataset = open_dataset(config, user)
    custom = make_custom_model(user, dataset, config.seed)
    if custom is not None:
        record = custom_model_config(custom, user)
        if same_code:
            require_same_code(config.custom_model, record)
        config = replace(config, custom_model=record)
    if dataset is None:
        sources = open_sources(config.data, config.model.vocab, config.model.separator)
        if custom is None and is_packed(sources[0]):
            validate_packing(config)
        if custom is not None and is_packed(sources[0]):
            raise ConfigError(
                "data.packing = true: packed samples have a third entry, the documents, which a model of your own does "
                "not take",
                "try data.packing = false",
            )
    else:
        source = dataset if is_source(dataset) else IndexableSource(dataset, collate=user.collate)
        sources = [check_source(source, config.launch, user.collate)]
    if custom is not None:
        custom = with_init_from_folder(config, custom).with_frozen_groups(config.optimizer)
        layout = Layout.from_config(config.layout)
        require_spec(custom.module, custom.spec, layout)
        if needs_values:
            custom.require_init()
            custom = prepare_custom_model(custom, sources[0], config, layout)
        else:
            custom = replace(custom, batch=find_structure(sources[0], custom.collate))
        spec = infer_spec_from_forward(custom, sources[0], user.parallel_spec)
        custom = replace(custom, spec=spec, inferred=tuple(describe_spec(spec, user.parallel_spec)))
    return UserRun(config, custom, sources)


def open_model_shapes(config: RunConfig, user: UserCode) -> UserRun:
    """The same for `plan`, `simulate` and `report`, which use the shapes of the model and of its data. Without a model,
    no data is opened.
    """
    user.require_model("loss", "source", "parallel_spec", "collate", "init", "reduction")
    return open_user_code(config, user, needs_values=False) if user.model is not None else UserRun(config, None, [])


def open_model_with_values(config: RunConfig, user: UserCode) -> UserRun:
    """The same for `prove`, which has the whole model in one process and runs the first batch itself."""
    config, custom, sources = open_model_shapes(config, user)
    if custom is not None:
        custom.require_init()
        custom = custom.with_values(config.seed)
    return UserRun(config, custom, sources)


def make_custom_model(user: UserCode, dataset: Any = None, seed: int = 0) -> CustomModel | None:
    """Returns the model that the user brings, or None if the model is that of the config. A callable builds it under
    `seed`.
    """
    user.require_model("loss", "parallel_spec", "metrics", "init", "reduction")
    if user.model is None:
        return None
    with torch_seed(seed):
        module = user.model if isinstance(user.model, nn.Module) else call_without_arguments(user.model, "model")
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"the model is a {type(module).__name__}", "expected an nn.Module, or a callable that returns one"
        )
    return CustomModel(
        module,
        user.loss,
        infer_parallel_spec(module, user.parallel_spec),
        collate=user.collate,
        metrics=dict(user.metrics or {}),
        reduction=user.reduction,
        init=user.init,
        code=build_code_record(module, user, dataset),
    )


@contextmanager
def torch_seed(seed: int) -> Iterator[None]:
    """Seeds torch's generators while a user's code builds a model, and restores them: the process is the user's."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def require_no_lora(config: RunConfig, user: UserCode) -> None:
    """Raises a ConfigError if low-rank adaptation of a user's model is asked for."""
    if user.model is not None and config.lora.enabled:
        raise ConfigError(
            f"lora.rank = {config.lora.rank} adapts the projections of a built-in family, and a model is given",
            "try lora.rank = 0 with a model that peft.get_peft_model returns: its frozen parameters stay frozen",
        )


def require_source(config: RunConfig, user: UserCode) -> None:
    """Raises a ConfigError if a model is given without data: the default text is for the built-in model."""
    if user.model is not None and user.source is None and config.data.kind == "stdlib" and not config.data.mixture:
        raise ConfigError(
            "a model is given without data: the default data, data.kind = stdlib, is text for the built-in model",
            "try --source MODULE:NAME, or data.kind and data.path of token or text files",
        )


def open_dataset(config: RunConfig, user: UserCode) -> Any:
    """Returns the user's dataset, which a callable without arguments may open, or None."""
    dataset = user.source
    if callable(dataset) and (isinstance(dataset, type) or not hasattr(dataset, "__getitem__")):
        dataset = call_without_arguments(dataset, "source")
    if dataset is not None and (config.data.mixture or config.data.path):
        key = "data.mixture" if config.data.mixture else "data.path"
        raise ConfigError(f"both {key} and source are given", "expected one of the two")
    return dataset


def custom_model_config(custom: CustomModel, user: UserCode) -> CustomModelConfig:
    """The record of a custom model in the run file of its run."""
    assert custom.code is not None
    names: dict[str, Any] = {
        name: text for name, text in user.entry_points.items() if name in (*ENTRY_POINT_KEYS, "reduction")
    }
    spec = custom.spec
    patterns = (spec.blocks,) if isinstance(spec.blocks, str) else spec.blocks
    blocks = ", ".join(filter(None, (*spec.before, *patterns, *spec.after)))
    return CustomModelConfig(class_=custom.code["class"], code=custom.code["fingerprint"], blocks=blocks, **names)


def require_same_code(before: CustomModelConfig, now: CustomModelConfig) -> None:
    """Raises an IdentityError if the config is of a run of another model, or of the same model with other code."""
    if before.class_ not in (None, now.class_):
        raise IdentityError(
            f"the config is of a run of the model {before.class_}, and the given model is {now.class_}",
            f"try {before.options}",
        )
    if before.code not in (None, now.code):
        raise IdentityError(
            f"the code of the model, loss, collate or source is not that of the run of the config (hash "
            f"{str(before.code)[:8]} -> {str(now.code)[:8]})",
            "try the code of that run, or remove [custom_model] from the run file",
        )


def is_source(value: Any) -> bool:
    """Whether a user's object implements `meshwright.core.data.source.Source`; other objects are indexed."""
    return all(hasattr(value, name) for name in ("name", "masked_sample", "fingerprint", "__len__", "__getitem__"))
