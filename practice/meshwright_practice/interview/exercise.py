"""The exercise: the prompt, the clarifying questions, the functions of the contract, and the stages with gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.base.records.phases import STEP_PHASES

PROMPT = """\
Build a distributed training pipeline in one notebook or script, in 55 minutes. The model and the data are yours and
small: sample i exists for every i below 64 and is always the same. What counts is that the pipeline is correct on one
rank and on two, after a kill, and that somebody else can see where the time goes. Start with the smallest version that
is correct, and add to it only what the next gate asks for."""


@dataclass(frozen=True)
class Clarification:
    """One question to ask before any code. The first answer is what is assumed if nobody answers."""

    option: str
    question: str
    answers: dict[str, str]
    """answer -> what it changes in this exercise"""


CLARIFICATIONS = (
    Clarification(
        "scope",
        "Do you want readable code first, or code as in production?",
        {
            "clarity": "errors of single ranks need not be logged",
            "production": "every rank logs its own errors, and this is checked",
        },
    ),
    Clarification(
        "device",
        "May I rely on a GPU, or must everything run on CPU?",
        {"cpu": "the code runs without any CUDA device", "gpu": "the CUDA devices of this machine stay visible"},
    ),
    Clarification(
        "restart",
        "After a failure, does the whole job restart, or does it go on with fewer ranks?",
        {
            "job": "a resume on the same number of ranks is checked",
            "elastic": "a resume on one rank instead of two, with the same global batch, is checked as well",
        },
    ),
    Clarification(
        "metrics",
        "Are metrics and experiment tracking part of the task?",
        {"yes": "records per rank and timed phases are checked", "no": "the last stage asks for no records"},
    ),
)


def default_options() -> dict[str, str]:
    return {each.option: next(iter(each.answers)) for each in CLARIFICATIONS}


@dataclass(frozen=True)
class ContractFunction:
    """A function that the user's file defines, and that the checks call or observe."""

    name: str
    parameters: tuple[str, ...]
    returns: str
    meaning: str

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(self.parameters)}) -> {self.returns}"


CONTRACT = {
    function.name: function
    for function in (
        ContractFunction("build_model", ("config",), "nn.Module", "the model, initialized from config['seed']"),
        ContractFunction(
            "fetch", ("indices",), "batch", "reads these samples; train calls it in the step that uses them"
        ),
        ContractFunction("loss", ("model", "batch"), "Tensor", "the mean loss over the samples of a batch"),
        ContractFunction(
            "train", ("config",), "dict", "trains this rank; returns {'losses': one float per optimizer step}"
        ),
        ContractFunction(
            "partition",
            ("num_samples", "rank", "world_size", "epoch", "seed"),
            "list[int]",
            "the samples of a rank in an epoch, in order",
        ),
        ContractFunction("global_batch", ("config",), "int", "samples per optimizer step over all ranks"),
        ContractFunction(
            "save", ("path", "state"), "None", "writes a checkpoint; state is a dict, path a file or a folder"
        ),
        ContractFunction("load", ("path",), "dict", "reads what save wrote"),
    )
}

CONFIG_KEYS: dict[str, str] = {
    "rank, local_rank, world_size": "the topology of this process; the process group exists already",
    "num_samples": "size of the data set",
    "micro_batch": "samples per rank and backward pass",
    "accumulation": "backward passes per optimizer step",
    "tensor_parallel, pipeline_parallel": "degrees of model parallelism, for global_batch; train gets 1",
    "steps": "the optimizer step to reach, counted from the start of the job",
    "lr, seed, dropout": "of the optimizer, of everything random, and of the model",
    "checkpoint": "path for save and load, or None",
    "save_every": "a checkpoint is saved after every so many optimizer steps",
    "resume": "whether to continue from the checkpoint",
    "log_dir": "folder in which every rank appends JSON lines to a file of its own, or None",
}

RULES = (
    "Leave the dtype to torch.get_default_dtype(): the checks compare gradients in float64.",
    "Use one optimizer of torch.optim that has state (AdamW, or SGD with momentum), without gradient clipping.",
    "Drop the samples at the end of an epoch that do not fill a global batch.",
    "Resume is refused if lr, seed, num_samples, dropout or the global batch differ from those of the checkpoint.",
    "A step's JSON line has rank, world_size, step, loss, seconds, and phases: a dict of the seconds of "
    f"{', '.join(STEP_PHASES)} and save. With DDP, sync is what backward does not hide.",
    "A failure's JSON line has rank, world_size, step and error.",
    "Calling init_process_group or destroy_process_group has no effect here.",
)

BASE_CONFIG: dict[str, Any] = {
    "rank": 0,
    "local_rank": 0,
    "world_size": 1,
    "num_samples": 30,
    "micro_batch": 1,
    "accumulation": 2,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "steps": 3,
    "lr": 0.01,
    "seed": 7,
    "dropout": 0.0,
    "checkpoint": None,
    "save_every": 2,
    "resume": False,
    "log_dir": None,
}
"""What a check changes of this is in `rank/probes.py`."""


@dataclass(frozen=True)
class InterviewStage:
    """A part of the exercise. Its gate is green when every check passes."""

    gate: int
    """the minute at which the stage ends"""
    title: str
    task: str
    needs: tuple[str, ...]
    """the functions of the contract that it asks for"""
    checks: tuple[str, ...]
    """names of `CHECKS` in `checks/registry.py`"""


STAGES = (
    InterviewStage(
        5, "clarify", "Ask the four questions, write the answers down, and say what one step is.", (), ("clarified",)
    ),
    InterviewStage(
        15,
        "one process",
        "A model, a data set and a training loop with gradient accumulation, on one rank.",
        ("build_model", "fetch", "loss", "train"),
        ("contract_15", "single_run", "loss_falls", "deterministic_run"),
    ),
    InterviewStage(
        30,
        "two ranks",
        "Give every rank its samples, and synchronize gradients once per optimizer step.",
        ("partition", "global_batch"),
        (
            "contract_30",
            "partition_deterministic",
            "partition_union",
            "partition_overlap",
            "partition_padding",
            "partition_reshuffle",
            "two_ranks_run",
            "sampler_used",
            "gradient_union",
            "sync_once",
            "global_batch",
        ),
    ),
    InterviewStage(
        40,
        "checkpoint and restart",
        "Save everything that the next step depends on, atomically, and continue after a kill.",
        ("save", "load"),
        (
            "contract_40",
            "restart_run",
            "resume_replay",
            "resume_skip",
            "restart_state",
            "restart_manifest",
            "config_identity",
            "atomic_save",
            "elastic_resume",
        ),
    ),
    InterviewStage(
        55,
        "instrumentation",
        "Every rank records its steps with timed phases, and its errors.",
        (),
        ("rank_records", "phases_timed", "phases_within_step", "phases_attributed", "rank_errors"),
    ),
)
GATES = tuple(stage.gate for stage in STAGES)


def prompt_text() -> str:
    """The exercise as it is printed: the prompt, the contract and the gates."""
    lines = [PROMPT, "", "Your file defines these functions; a gate says which of them it needs:"]
    for stage in STAGES:
        for name in stage.needs:
            lines.append(f"  gate {stage.gate:>2}  {CONTRACT[name].signature}")
            lines.append(f"           {CONTRACT[name].meaning}")
    lines += ["", "config is a dict with these keys:"]
    lines += [f"  {keys}: {meaning}" for keys, meaning in CONFIG_KEYS.items()]
    lines += ["", "Rules:", *(f"  {rule}" for rule in RULES), "", "Gates:"]
    lines += [f"  minute {stage.gate:>2}  {stage.title}: {stage.task}" for stage in STAGES]
    return "\n".join(lines)
