"""The verbs `prove` and `simulate` as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.base.cli.python_args import errors_for_python, given_path, validated
from meshwright.base.config import RunConfig
from meshwright.base.io import write_json
from meshwright.base.user_code.user_code import UserCode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshwright.core.parallel.parallel_spec import ParallelSpec
    from meshwright.prover.simulator.result import Simulation


def prove(
    config: RunConfig | None = None,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    loss: Callable[..., Any] | None = None,
    source: Any = None,
    parallel_spec: ParallelSpec | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    reduction: Literal["sum", "mean"] | None = None,
    init: Callable[[str, Tensor], Any] | None = None,
    ranks: int | None = None,
    out: str | Path | None = None,
    full: bool = False,
    device: Literal["cuda"] | None = None,
) -> dict[str, Any]:
    """Checks the stream, training, communication and recovery contracts of a config on this machine.

    Args:
        config: settings of the run. Default: the ``tiny`` preset.
        model: model to prove instead of that of the config, as in :func:`train`.
        loss: loss of ``model``, as in :func:`train`.
        source: dataset of ``model``, as in :func:`train`.
        parallel_spec: how to parallelize ``model``, as in :func:`train`.
        collate: makes a batch of a list of samples, as in :func:`train`.
        reduction: what ``loss`` returns, as in :func:`train`.
        init: initializes a ``model`` on the meta device, as in :func:`train`.
        ranks: total number of ranks; sets ``layout.replicate`` accordingly. Default: those of ``config.layout``.
        out: file to write the certificate to, as JSON. Default: it is not written.
        full: prove the configured runs in full size; only the number of steps shrinks. Default: ``False``.
        device: ``"cuda"`` proves on the CUDA devices of this machine, and there every axis on 2 and 4 ranks, in bf16
            and float32, compiled and not. Default: the device of ``config.launch``, and the layout of the config alone.

    Returns:
        dict: the certificate. ``certificate["passed"]`` is True if every contract holds.

    Raises:
        ConfigError: the config is not valid.
        IdentityError: the config is of a run of another model.
    """
    from meshwright.base.io import output_file
    from meshwright.base.topology.unsupported import validate
    from meshwright.core.launch.user_code.make_custom_model import open_model_with_values
    from meshwright.prover.prove import certify

    with errors_for_python():
        config = validated(config, ranks)
        if device is not None:
            config = replace(config, launch=replace(config.launch, device=device))
        validate(config, own_model=model is not None)
        file = output_file(given_path(out, "out"), "out") if out is not None else None
        user = UserCode(model, loss, source, parallel_spec, collate, reduction=reduction, init=init)
        config, custom, sources = open_model_with_values(config, user)
        certificate = certify(config, full=full, custom=custom, sources=sources, on_device=device is not None)
        if file is not None:
            write_json(file, certificate)
        return certificate


def simulate(
    config: RunConfig | None = None,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    loss: Callable[..., Any] | None = None,
    source: Any = None,
    parallel_spec: ParallelSpec | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    reduction: Literal["sum", "mean"] | None = None,
    init: Callable[[str, Tensor], Any] | None = None,
    ranks: int | None = None,
    rank: Sequence[int] = (),
) -> Simulation:
    """Runs one step of the real model and parallelism on fake tensors, and counts communication and memory.

    The simulation runs in this process on any number of ranks, needs no devices, and touches no run folder.

    Args:
        config: settings of the run. Default: the ``tiny`` preset.
        model: model to simulate instead of that of the config, as in :func:`train`.
        loss: loss of ``model``, as in :func:`train`.
        source: dataset of ``model``, as in :func:`train`.
        parallel_spec: how to parallelize ``model``, as in :func:`train`.
        collate: makes a batch of a list of samples, as in :func:`train`.
        reduction: what ``loss`` returns, as in :func:`train`.
        init: initializes a ``model`` on the meta device, as in :func:`train`.
        ranks: total number of ranks; sets ``layout.replicate`` accordingly. Default: those of ``config.layout``.
        rank: ranks to simulate. Default: rank 0 and, with a pipeline, the first rank of the last stage.

    Returns:
        Simulation: message and wire bytes per collective, and peak memory per class, of each simulated rank.

    Raises:
        ConfigError: the config is not valid on this number of ranks.
        IdentityError: the config is of a run of another model.
    """
    user = UserCode(model, loss, source, parallel_spec, collate, reduction=reduction, init=init)
    with errors_for_python():
        return simulate_run(validated(config, ranks), user, rank)


def simulate_run(config: RunConfig, user: UserCode, rank: Sequence[int] = ()) -> Simulation:
    """Simulates the model of a config, or that of the user."""
    from meshwright.core.launch.user_code.make_custom_model import open_model_shapes
    from meshwright.prover.simulator.simulate import simulate as simulate_config

    config, custom, sources = open_model_shapes(config, user)
    return simulate_config(config, rank, custom, sources)
