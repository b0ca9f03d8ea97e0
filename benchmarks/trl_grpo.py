"""GRPO of TRL on the model, weights, prompts, tokenizer and rewards of a run of Meshwright, for the benchmark `rl`.

python -m benchmarks.trl_grpo SPEC, where SPEC is JSON: `overrides` of examples/rl.toml, `folder` for the records and
checkpoints, `seconds` or `steps` after which it ends, `save_steps`, `steps_per_generation`, and `kills`: the optimizer
steps at which attempts are killed, one after the other. Every attempt is forked from this process and resumes from the
newest checkpoint. The records have the rewards of every generation, and which rollouts every step has trained.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from benchmarks.rl_records import load_run_config
from meshwright.base.config import RunConfig
from meshwright.base.models.registry import stored_parameters, write_huggingface_config
from meshwright.core.data.character_tokenizer import CHARACTERS
from meshwright.core.data.sample_lookup import build_stream
from meshwright.core.models.init import build_model
from meshwright.rl.tasks.answer_reward import answer_reward
from meshwright.rl.tasks.prompt_source import open_prompt_source

END = "<end>"
MAX_PROMPTS = 1 << 15
MAX_STEPS = 10_000
THREADS = 1
"""As many as each process of a run of Meshwright has. Two are not faster for so small a model."""


@dataclass
class Spec:
    """What one process does."""

    folder: Path
    overrides: list[str]
    seconds: float = 0.0
    steps: int = 0
    save_steps: int = 0
    steps_per_generation: int = 1
    kills: list[int] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", help="what the process does, as JSON")
    record = json.loads(parser.parse_args().spec)
    spec = Spec(Path(record.pop("folder")), **record)
    spec.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(THREADS)
    if not spec.kills:
        return train(spec, 0, None)
    for attempt, kill in enumerate([*spec.kills, None]):
        child = os.fork()
        if child == 0:
            try:
                train(spec, attempt, kill)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != (-signal.SIGKILL if kill is not None else 0):
            raise RuntimeError(f"attempt {attempt} of TRL ended with status {status}, to be killed at step {kill}")


def train(spec: Spec, attempt: int, kill: int | None) -> None:
    """One attempt, which kills itself in the optimizer step after `kill` completed ones."""
    config = load_run_config(spec.overrides)
    records = Records(spec.folder / "records.jsonl", attempt)
    callback = Watch(records, spec.seconds, kill)

    def reward(completions: list[str], answer: list[str], number: list[int], **_: Any) -> list[float]:
        task = config.rl.task
        pairs = zip(completions, answer, strict=True)
        rewards = [answer_reward({"answer": own, "task": task}, completion) for completion, own in pairs]
        records.write(step=callback.step, prompts=number, completions=completions, rewards=rewards)
        return rewards

    trainer = recorded_trainer(records)(
        make_model(config), reward, arguments(config, spec), make_dataset(config), None, make_tokenizer()
    )
    trainer.add_callback(callback)
    newest = sorted(spec.folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    trainer.train(resume_from_checkpoint=str(newest[-1]) if newest else None)
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    records.write(digest=digest.hexdigest())


class Records:
    """One line of JSON per event; a line that is written outlives a kill."""

    def __init__(self, path: Path, attempt: int) -> None:
        self.path, self.attempt = path, attempt

    def write(self, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"time": time.time(), "attempt": self.attempt, **values}) + "\n")


def recorded_trainer(records: Records) -> Any:
    """The class of a trainer that records which rollouts a step trains. The id of a rollout travels with its tensors,
    which TRL shuffles.
    """
    from trl import GRPOTrainer

    class RecordedTrainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            seen: Counter[int] = Counter()
            ids = []
            for row in inputs:
                ids.append(row["number"] * self.num_generations + seen[row["number"]])
                seen[row["number"]] += 1
            output["rollout"] = torch.tensor(ids)
            return output

        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
            inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
            if self.model.training:
                records.write(step=self.state.global_step, trained=sorted(inputs["rollout"].tolist()))
            return inputs

    return RecordedTrainer


class Watch(TrainerCallback):  # type: ignore[misc]
    """Knows the step, stops after a time, and kills the process before the update of a step."""

    def __init__(self, records: Records, seconds: float, kill: int | None) -> None:
        self.records, self.seconds, self.kill = records, seconds, kill
        self.step, self.began = 0, 0.0

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.step, self.began = state.global_step, time.monotonic()
        self.records.write(begin=self.step)

    def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self.kill is not None and state.global_step >= self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step
        if self.seconds and time.monotonic() - self.began > self.seconds:
            control.should_training_stop = True


def arguments(config: RunConfig, spec: Spec) -> Any:
    """The settings of the run in TRL's words: one micro-batch per step, which TRL is fastest with."""
    from trl import GRPOConfig

    rl, optimizer = config.rl, config.optimizer
    saving = {"save_strategy": "steps", "save_steps": spec.save_steps} if spec.save_steps else {"save_strategy": "no"}
    return GRPOConfig(
        output_dir=str(spec.folder),
        per_device_train_batch_size=config.batch.global_,
        num_generations=rl.group_size,
        gradient_accumulation_steps=1,
        steps_per_generation=spec.steps_per_generation,
        max_completion_length=rl.completion_tokens,
        temperature=rl.temperature,
        top_k=0,
        beta=rl.kl,
        epsilon=rl.clip,
        loss_type="dapo" if rl.normalization == "token" else "grpo",
        scale_rewards="group" if rl.scale_rewards else "none",
        shuffle_dataset=False,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=config.schedule.warmup,
        max_steps=spec.steps or MAX_STEPS,
        seed=config.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **saving,
    )


def make_model(config: RunConfig) -> Any:
    """LlamaForCausalLM of the same shape with the initial weights of the run."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**write_huggingface_config(config.model)))
    weights = dict(build_model(config.model, config.seed).named_parameters())
    stored = {part.stored: weights[part.name] for part in stored_parameters(config.model)}
    model.load_state_dict(stored, strict=not config.model.tie)
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = settings.pad_token_id = 0
        settings.bos_token_id = None
    return model


def make_dataset(config: RunConfig) -> Any:
    """The prompts of the run, in its order."""
    from datasets import Dataset

    source = open_prompt_source(config)
    ids = build_stream(config, [source]).sample_ids(np.arange(MAX_PROMPTS, dtype=np.uint64))  # type: ignore[list-item]
    items = [source[int(index)].item for index in ids]
    columns = {"prompt": [item["text"] for item in items], "answer": [item["answer"] for item in items]}
    return Dataset.from_dict(columns | {"number": list(range(len(items)))})


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with the token ids of the tasks."""
    vocabulary = {END: 0} | {character: index + 1 for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    main()
