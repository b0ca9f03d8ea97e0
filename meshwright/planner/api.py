"""The verb `plan` as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.base.cli.python_args import errors_for_python
from meshwright.base.config import PRESETS, RunConfig, config_from_dict, config_to_dict
from meshwright.base.models.initial_model import load_run_config
from meshwright.base.user_code.user_code import UserCode
from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshwright.core.parallel.parallel_spec import ParallelSpec
    from meshwright.planner.search.plan_result import PlanResult
    from meshwright.planner.workload.workload import Workload


def plan(
    config: str | Path | RunConfig | None = None,
    cluster: str = "h100",
    *,
    model: nn.Module | Callable[[], nn.Module] | str | Path | RunConfig | None = None,
    loss: Callable[..., Any] | None = None,
    source: Any = None,
    parallel_spec: ParallelSpec | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    reduction: Literal["sum", "mean"] | None = None,
    init: Callable[[str, Tensor], Any] | None = None,
    ranks: int | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    choice: int = 1,
    top: int = 5,
    scale: bool = False,
    critical_batch: float | None = None,
    overrides: Sequence[str] = (),
    plan_file: str = "PLAN.toml",
    headroom: float | None = None,
    trainer: str = "meshwright",
    every_plan: bool = False,
    tokens: float | None = None,
    price: float | None = None,
    expert_load: float | str | Path | None = None,
) -> PlanResult:
    """Searches for the fastest layout of a model on a cluster. Needs no devices, and imports torch only for a model of
    one's own, which is traced on fake tensors.

    Args:
        config: a preset, the path of a run file, the path of a Hugging Face ``config.json``, or a config. Default for
            a model of one's own: the ``tiny`` preset, of which batch, precision and optimizer are used.
        cluster: ``"h100"`` (one node), ``"h100:4"`` (devices), ``"h100:8x16"`` (16 nodes of 8), the path of a cluster
            file, or ``"here"`` (this machine, as measured by ``meshwright plan measure``).
        model: model to plan instead of that of the config, as in :func:`train`. It may be on the meta device.
        loss: loss of ``model``, as in :func:`train`.
        source: dataset of ``model``, as in :func:`train`; the shapes of its first samples are used.
        parallel_spec: how to parallelize ``model``, as in :func:`train`.
        collate: makes a batch of a list of samples, as in :func:`train`.
        reduction: what ``loss`` returns, as in :func:`train`.
        init: initializes a ``model`` on the meta device, as in :func:`train`.
        ranks: number of devices to use. Default: all devices of the cluster.
        batch: samples per optimizer step, over all ranks. Default: that of the run.
        sequence: tokens per sample. Default: that of the run.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"fp64"``, ``"fp8"`` or ``"fp4"``. Default: that of the run.
        choice: which plan of the ranking is ``result.chosen`` and is explained; the best is 1.
        top: number of plans in the ranking, at least.
        scale: if True, also estimates how the plan scales to 64 times the devices.
        critical_batch: critical batch size in tokens, for ``scale``. Default: estimated from the model size.
        overrides: config keys to fix, such as ``["layout.tensor=8"]``; the search keeps them.
        plan_file: name of the run file in the commands that the explanation suggests.
        headroom: share of device memory that a plan leaves free. Default: 0.08.
        trainer: trainer to plan for, such as ``"megatron"`` or ``"torchtitan"``: its layouts, speed and FLOP count.
        every_plan: if True, the ranking has all plans, and not only the best of each family of similar plans.
        tokens: token budget of the training run, whose GPU-hours and energy are stated.
        price: price of a GPU-hour, for the cost of ``tokens``.
        expert_load: load of the busiest expert-parallel rank as a multiple of the mean, or the folder of a finished run
            whose measured loads are used. Default: a balanced load.

    Returns:
        PlanResult: the ranking, the chosen plan with predicted step time and memory, and its explanation.

    Raises:
        ConfigError: an argument is not valid, or no layout fits into memory.
    """
    if config is None and isinstance(model, str | Path | RunConfig):
        config, model = model, None
    assert not isinstance(model, str | Path | RunConfig)
    user = UserCode(model, loss, source, parallel_spec, collate, reduction=reduction, init=init)
    with errors_for_python():
        workload = plan_workload(
            config, user, cluster, overrides, batch, sequence, precision, headroom, trainer, expert_load
        )
        return plan_run(
            workload, cluster, ranks, choice, top, scale, critical_batch, plan_file, every_plan, tokens, price
        )


def plan_run(
    workload: Workload,
    cluster: str,
    ranks: int | None,
    choice: int,
    top: int,
    scale: bool,
    critical_batch: float | None,
    plan_file: str,
    every_plan: bool = False,
    tokens: float | None = None,
    price: float | None = None,
) -> PlanResult:
    """Plans a workload on so many devices of a cluster."""
    from meshwright.base.hardware.resolve_cluster import resolve_cluster, with_whole_nodes
    from meshwright.planner.search.plan_result import make_plan
    from meshwright.planner.search.run_cost import MAX_PRICE, MAX_TOKENS

    if critical_batch is not None and not 1 <= critical_batch <= MAX_TOKENS:
        raise ConfigError(f"critical batch {critical_batch} is out of range", f"expected 1 to {MAX_TOKENS:g} tokens")
    if critical_batch is not None and not scale:
        raise ConfigError("a critical batch is given without scaling", "try it with --scale (scale=True)")
    if price is not None and not 0 <= price <= MAX_PRICE:
        raise ConfigError(f"price {price} is out of range", f"expected a price of a GPU-hour, up to {MAX_PRICE:g}")
    if price is not None and tokens is None:
        raise ConfigError("a price is given without a token budget", "expected the tokens of the training run, too")
    devices = resolve_cluster(cluster)
    if ranks is not None:
        if not 1 <= ranks <= devices.device_count:
            raise ConfigError(
                f"{ranks} ranks on {devices.device_count} devices", f"expected 1 to {devices.device_count} ranks"
            )
        devices = with_whole_nodes(devices, ranks)
    return make_plan(workload, devices, choice, top, scale, critical_batch, plan_file, every_plan, tokens, price)


def plan_workload(
    config: str | Path | RunConfig | None,
    user: UserCode,
    cluster: str,
    overrides: Sequence[str] = (),
    batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    headroom: float | None = None,
    trainer: str = "meshwright",
    expert_load: float | str | Path | None = None,
) -> Workload:
    """Describes what is to be planned: the model of a config or of a name, or the user's model with that config, which
    is traced in the precision that it has on the cluster.
    """
    from meshwright.planner.search.trainer_rules import validate_options
    from meshwright.planner.workload.workload_args import for_trainer

    work = described_workload(config, user, cluster, overrides, batch, sequence, precision)
    work = for_trainer(work, trainer, headroom)
    validate_options(work, overrides)
    if expert_load is None:
        return work
    from meshwright.planner.workload.expert_load_file import with_expert_load

    return with_expert_load(work, expert_load)


def described_workload(
    config: str | Path | RunConfig | None,
    user: UserCode,
    cluster: str,
    overrides: Sequence[str],
    batch: int | None,
    sequence: int | None,
    precision: str | None,
) -> Workload:
    from meshwright.planner.workload.workload_args import build_workload, split_overrides, workload_from_config

    if user.model is None:
        user.require_model("loss", "source", "parallel_spec", "collate", "init", "reduction")
        if config is None:
            raise ConfigError("neither a config nor a model is given", "expected a preset, a run file, or model=...")
    elif isinstance(config, str | Path):
        preset, settings = str(config) in PRESETS, split_overrides(overrides)[1]
        config = load_run_config(
            None if preset else Path(config), [*([f"preset={config}"] if preset else []), *settings]
        )
    elif config is None:
        config = RunConfig()
    if not isinstance(config, RunConfig):
        return build_workload(str(config), overrides, batch, sequence, precision)
    changed = {"batch.global": batch, "data.sequence": sequence, "precision.compute": precision}
    tree = config_to_dict(config)
    for key, value in changed.items():
        section, _, name = key.partition(".")
        tree[section] |= {name: value} if value is not None else {}
    config = config_from_dict(tree)
    if user.model is None:
        config.require_built_in_model()
        return workload_from_config(config, overrides)
    if sequence is not None:
        raise ConfigError("the sequence length of a custom model is that of its data", "try it without --sequence")
    from meshwright.base.config.device_defaults import with_device_defaults
    from meshwright.base.hardware.resolve_cluster import resolve_cluster
    from meshwright.core.launch.user_code.make_custom_model import open_model_shapes
    from meshwright.core.trainer.records.trace_custom_model import trace_workload

    config, custom, sources = open_model_shapes(config, user)
    assert custom is not None
    on_device = with_device_defaults(config, resolve_cluster(cluster).device_type, own_model=True)
    return workload_from_config(config, overrides, trace_workload(custom, on_device, sources))
