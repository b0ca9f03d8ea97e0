"""Prepares a run of reinforcement learning: its prompts, its reward, a user's model, and the rollout service."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from meshwright.base.config import Batch, RunConfig
from meshwright.base.environment import started_by_torchrun
from meshwright.base.models.registry import lora_spec
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.scratch_folder import ScratchFolder, remove_stale_folders
from meshwright.base.topology.layout import Layout
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.data.sample_lookup import build_stream
from meshwright.core.data.source import Source
from meshwright.core.generate.load import fill_initial
from meshwright.core.launch.initial_weights import with_init_from_folder
from meshwright.core.launch.ranks import cuda_started
from meshwright.core.launch.user_code.make_custom_model import (
    UserRun,
    custom_model_config,
    make_custom_model,
    open_dataset,
    require_no_lora,
)
from meshwright.core.models.init import build_empty
from meshwright.core.parallel.infer_spec import describe_spec
from meshwright.core.parallel.parallelize import require_spec
from meshwright.core.parallel.world import device_type
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.precision import Precision, set_determinism
from meshwright.errors import ConfigError
from meshwright.rl.generator.policy_model import FamilyPolicy, ModulePolicy, PolicyModel
from meshwright.rl.policy.policy_check import check_policy
from meshwright.rl.policy.policy_model import policy_custom_model
from meshwright.rl.rewards.reward_function import RewardFunction
from meshwright.rl.service.service import RolloutService
from meshwright.rl.service.setup import RolloutSetup
from meshwright.rl.tasks.prompt_source import PromptSource, open_prompt_source


def validate_rollouts(config: RunConfig, batch: Batch) -> None:
    """Raises a ConfigError for settings that a run of reinforcement learning cannot have."""
    rl = config.rl
    if batch.global_ % rl.group_size:
        below = batch.global_ - batch.global_ % rl.group_size
        sizes = f"{below} or {below + rl.group_size}" if below else str(rl.group_size)
        raise ConfigError(
            f"batch.global = {batch.global_} rollouts are not whole groups of rl.group_size = {rl.group_size}",
            f"expected a multiple, such as {sizes}",
        )
    if rl.vllm_url and rl.generators > 1:
        raise ConfigError(
            f"rl.generators = {rl.generators} with rl.vllm_url: the server has one policy at a time",
            "expected rl.generators = 1",
        )
    if cuda_started():
        raise ConfigError(
            "this process has initialized CUDA, and the generators are forked from it",
            "try to call train before anything initializes CUDA, or the command line",
        )
    if config.launch.hosts > 1 or started_by_torchrun():
        raise ConfigError(
            "reinforcement learning on several hosts or under torchrun is unsupported: the rollout service runs beside "
            "the ranks of one host",
            "try meshwright train on one host",
        )


def open_rollout_code(config: RunConfig, user: UserCode) -> UserRun:
    """Opens the prompts of a run, and makes the user's model with the policy objective in place of its loss."""
    require_no_lora(config, user)
    if user.loss is not None or user.collate is not None:
        raise ConfigError(
            "loss or collate is given, and the loss of a run with rl.objective is that objective",
            "try without them, or rl.objective = none",
        )
    dataset = open_dataset(config, user)
    if dataset is not None and config.rl.has_task:  # the name of a task stands for its prompts and its tokenizer
        config = replace(config, rl=replace(config.rl, task=type(dataset).__name__))
    prompts = open_prompt_source(config, dataset)
    sources: list[Source] = [prompts]
    custom = make_custom_model(replace(user, source=None), dataset, config.seed)
    if custom is None:
        return UserRun(config, None, sources)
    config = replace(config, custom_model=custom_model_config(custom, user))
    custom = policy_custom_model(custom, config.rl)
    check_policy(custom, config, prompts.tokenizer.vocab)
    custom = with_init_from_folder(config, custom).with_frozen_groups(config.optimizer)
    require_spec(custom.module, custom.spec, Layout.from_config(config.layout))
    custom.require_init()
    custom = replace(custom, inferred=tuple(describe_spec(custom.spec, user.parallel_spec)))
    return UserRun(config, custom, sources)


def make_rollout_service(
    config: RunConfig,
    batch: Batch,
    folder: RunFolder,
    sources: Sequence[Source],
    custom: CustomModel | None,
    reward: RewardFunction,
) -> RolloutService:
    """The rollout service of a run; it starts with the first attempt."""
    if custom is not None and config.rl.vllm_url:
        raise ConfigError(
            "rl.vllm_url with a custom model: policies are exported for the server in the format of Hugging Face",
            "try without rl.vllm_url, or a built-in model",
        )
    if config.rl.vllm_url and folder.url:
        raise ConfigError(
            f"rl.vllm_url with {folder.url}: a vLLM server loads policies from a folder", "try a run in a folder"
        )
    prompts = cast(PromptSource, sources[0])  # `open_rollout_code` has opened it
    make_policy = partial(build_policy, config, custom)
    stream = build_stream(config, sources)
    remove_stale_folders()
    # The path of a socket has at most 107 bytes, so it cannot be in the run folder.
    scratch = ScratchFolder()
    address = scratch.path / "rollouts"
    setup = RolloutSetup(config, batch, folder, prompts, stream, reward, make_policy, address)
    return RolloutService(setup, lambda: scratch.remove())  # the folder exists as long as the object


def build_policy(config: RunConfig, custom: CustomModel | None) -> PolicyModel:
    """A policy on the device of a generator, whose weights are then those of a published version."""
    device = torch.device(device_type(config.launch))
    set_determinism(config.precision, config.launch.threads, device)  # as in the ranks: equal bits need it
    precision = Precision(config.precision, device)
    if custom is None:
        model = build_empty(config.model, precision.parameters, device, config.lora, precision.residual)
        spec = lora_spec(config.model, config.lora)
        if config.lora.enabled:  # a policy has the adapters alone
            fill_initial(model, spec, config)
        return FamilyPolicy(model, spec, precision.autocast)
    module = copy.deepcopy(custom.module)
    empty = module.to_empty(device=device) if custom.on_meta() else module.to(device)
    return ModulePolicy(empty.to(precision.parameters), precision.autocast)
