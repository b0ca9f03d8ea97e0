"""Explains a wrong gradient norm or a wrong update: computes candidates from the recorded gradients and names the one
that equals what the run did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from math import isfinite, sqrt

import torch
from torch import Tensor

from meshwright.base.config import OptimizerConfig, RunConfig
from meshwright.prover.compare.discrepancy import Quantity, compare_tensors
from meshwright.prover.oracle.optimizer import clip_factor, global_norm
from meshwright.prover.oracle.update_rules import MATRIX_RULES, ReferenceOptimizer, Settings, State
from meshwright.prover.trace import StepTrace
from meshwright.prover.tracer import AssembledTrace, Index

MAX_ERROR = 1e-6
"""The largest relative error of a candidate that explains what was found; stored parameters are rounded in addition."""

MAX_DEFINED_ERROR = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-5, "fp16": 1e-5}
"""The largest relative error of an update that counts as the one that the optimizer defines, by precision."""

Regions = Mapping[str, list[tuple[Index, int]]]
"""For every parameter, the index of each shard and the rank that has it."""
Factor = Callable[[str], float | Tensor]
"""By parameter, what its gradient is multiplied by before the update."""

Candidate = tuple[str, Callable[[str], Tensor]]
"""What may be wrong, and a function of a parameter's name: the parameter after an update that is wrong in this way."""

LOST_STATE = {
    "exp_avg": "the first moment",
    "exp_avg_sq": "the second moment",
    "momentum": "the momentum",
    "momentum_buffer": "the momentum",
    "row_var": "the second moment of the rows",
    "col_var": "the second moment of the columns",
    "variance": "the second moment",
}
"""State key -> what it is."""
SIGNED_STATE = ("exp_avg", "momentum", "momentum_buffer")
"""State that changes its sign with the gradient."""


@dataclass(frozen=True)
class RecordedUpdate:
    """One step of a run: what the optimizer read and what it wrote."""

    config: RunConfig
    step: StepTrace
    before: Mapping[str, Tensor]
    """the parameters before the step"""
    moments: Mapping[str, Tensor]
    """the optimizer state before the step"""
    regions: Regions
    optimizer: ReferenceOptimizer

    def explain_norm(self) -> str:
        """Which gradients the norm counts; '' if no candidate fits."""
        total, found = global_norm(self.step.gradients), self.step.grad_norm
        candidates = {
            "the contribution of some ranks is missing: the norm is that of the shards of rank 0": self.local_norms()[
                0
            ],
            "the norm is squared": total**2,
        }
        for kind, part in {"": "", "expert ": ".bank.", "norm ": "norm."}.items():
            names = [name for name in self.step.gradients if part in name]
            once = global_norm({name: self.step.gradients[name] for name in names})
            counted = sum(norm**2 for norm in self.local_norms(names).values())
            text = f"replicated {kind}weights are counted more than once: those of all ranks that have them"
            candidates[text] = sqrt(max(0.0, total**2 - once**2) + counted)
        return next((text for text, norm in candidates.items() if abs(norm - found) <= MAX_ERROR * found), "")

    def explain_update(self, names: list[str]) -> str:
        """What explains the updates of these parameters; '' if no candidate fits."""
        names = [name for name in names if name in self.step.gradients]
        if names and (stored := self.explain_storage()):
            return stored
        clip = clip_factor(global_norm(self.step.gradients), self.config.optimizer.clip)
        if names and all(self.fits(name, lambda name: self.update(name, clip)) for name in names):
            candidates, otherwise = (
                self.wrong_states(clip),
                "it follows from an optimizer state that is wrong before it",
            )
        else:
            candidates, otherwise = chain(self.wrong_updates(clip), self.wrong_states(clip)), ""
        fitting = (text for text, update in candidates if all(self.fits(name, update) for name in names))
        return next(fitting, otherwise) if names else ""

    def explain_storage(self) -> str:
        """Whether all parameters or moments have values of a lower precision; '' if not."""
        names = list(self.step.gradients)
        after = [self.step.parameters[name] for name in names]
        if all(torch.equal(value, self.before[name]) for name, value in zip(names, after, strict=True)):
            return ""
        moments = [value for name in names for key, value in self.state_of(name).items() if key != "step"]
        for what, tensors in {"the parameters are": after, "the moments are": moments}.items():
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                used = any(bool(tensor.any()) for tensor in tensors)
                if used and all(
                    tensor.dtype.itemsize > dtype.itemsize and is_rounded(tensor, dtype) for tensor in tensors
                ):
                    return f"{what} rounded to {str(dtype).removeprefix('torch.')}"
        return ""

    def wrong_states(self, clip: float) -> Iterator[Candidate]:
        """(what is wrong with the state before the step, the parameter after an update of that state)."""
        keys = {key for name in self.step.gradients for key in self.state_of(name)}
        for key, text in LOST_STATE.items():
            if key in keys:
                yield f"{text} is lost", partial(self.update, factor=clip, lost=(key,))
        yield "the optimizer state is lost", lambda name: self.update(name, clip, lost=tuple(keys))
        if "step" in keys:
            yield "the bias correction counts from the start", lambda name: self.update(name, clip, lost=("step",))

    def wrong_updates(self, right: float) -> Iterator[Candidate]:
        """(what is wrong, the parameter after the update that is wrong in this way)."""
        settings, norm = self.config.optimizer, global_norm(self.step.gradients)
        local = self.local_norms()
        ones = {name: torch.ones_like(gradient) for name, gradient in self.step.gradients.items()}
        for name, regions in self.regions.items():
            for where, rank in reversed(regions if name in ones else []):
                ones[name][where] = clip_factor(local[rank], settings.clip)
        clipping: dict[str, Factor] = {
            "the gradients are not clipped": lambda _: 1.0,
            "the gradients are clipped twice": lambda _: right**2,
            "every rank clips by the norm of its own shards": lambda name: ones[name],
            "every parameter is clipped by its own norm": lambda name: clip_factor(
                float(self.step.gradients[name].double().norm()), settings.clip
            ),
            "the gradients are clipped by the norm of the scaled gradients": lambda _: clip_factor(
                norm * self.config.precision.loss_scale, settings.clip
            ),
        }
        clipping["the gradient does not reach the optimizer, or is clipped to zero"] = lambda _: 0.0
        for text, factor in clipping.items():
            yield text, lambda name, factor=factor: self.update(name, factor(name))  # type: ignore[misc]
        yield "the parameter is not updated", lambda name: self.before[name].double()
        yield "there is no weight decay", lambda name: self.update(name, right, decay=0.0)
        yield (
            "weight decay applies to vectors, too",
            lambda name: self.update(name, right, decay=settings.weight_decay),
        )
        yield from self.wrong_groups(right)
        yield from self.wrong_matrices(right)
        yield (
            "weight decay is added to the gradient",
            lambda name: self.update(name, right, decay=0.0, coupled=settings.weight_decay),
        )
        yield "the bias correction is missing", lambda name: self.update(name, right, more_updates=1 << 30)
        yield "the bias correction counts one update too many", lambda name: self.update(name, right, more_updates=1)
        yield (
            "epsilon is inside the square root",
            lambda name: self.update(name, right, eps=0.0, added_to_root=settings.eps),
        )
        yield "the betas are swapped", lambda name: self.update(name, right, beta1=settings.beta2, beta2=settings.beta1)
        defaults = OptimizerConfig()
        for key in ("beta1", "beta2", "eps", "weight_decay", "momentum", "nesterov"):
            default = getattr(defaults, key)
            if default != getattr(settings, key):
                text = f"optimizer.{key} is {getattr(settings, key):g}, and its default {default:g} is used"
                yield text, lambda name, key=key, default=default: self.update(name, right, **{key: default})  # type: ignore[misc]
        yield "weight decay applies twice", lambda name: self.update(name, right, decay=2 * self.settings(name).decay)
        yield "the update has the wrong sign", lambda name: self.update(name, right, sign=-1.0)

    def wrong_groups(self, right: float) -> Iterator[Candidate]:
        """Updates with the settings of another parameter group."""
        factors = {self.settings(name).lr_factor for name in self.step.gradients} | {1.0}
        for factor in sorted(factors) if len(factors) > 1 else ():
            yield (
                f"the learning rate has the factor {factor:g} of another group",
                partial(self.update, factor=right, lr_factor=factor),
            )
        decays = {self.settings(name).decay for name in self.step.gradients}
        for decay in sorted(decays) if len(decays) > 1 else ():
            yield (
                f"the weight decay is {decay:g}, that of other parameters",
                partial(self.update, factor=right, decay=decay),
            )

    def wrong_matrices(self, right: float) -> Iterator[Candidate]:
        """Updates that a rule such as Muon makes of other tensors than whole matrices of blocks."""
        kind = self.config.optimizer.kind
        if kind not in MATRIX_RULES:
            return
        yield (
            f"every rank updates its own shard by {kind}, not the whole matrix",
            lambda name: self.sharded_update(name, right),
        )
        yield (
            f"{kind} updates it, and {MATRIX_RULES[kind]} should: it is in no block, or no matrix",
            lambda name: self.update(name, right, rule=kind),
        )
        yield (
            f"{MATRIX_RULES[kind]} updates it, and {kind} should: it is a matrix of a block",
            lambda name: self.update(name, right, rule=MATRIX_RULES[kind]),
        )

    def sharded_update(self, name: str, factor: float) -> Tensor:
        """The parameter after an update of its shards, each as if it were the whole matrix."""
        parameter, settings, state = self.before[name].double(), self.settings(name), self.state_of(name)
        if settings.rule not in MATRIX_RULES or any(s.shape != parameter.shape for s in state.values()):
            return self.update(name, factor)
        gradient, after = self.step.gradients[name].double() * factor, parameter.clone()
        for where, _ in self.regions.get(name, []):
            shard, own = parameter[where], {key: value[where] for key, value in state.items()}
            if shard.numel():
                after[where], _ = self.optimizer.update(
                    name, shard, gradient[where], own, self.step.lr, settings, tuple(parameter.shape)
                )
        return after

    def settings(self, name: str) -> Settings:
        return self.optimizer.settings(name, self.before[name])

    @cached_property
    def states(self) -> dict[str, State]:
        """The recorded optimizer state before the step, by parameter."""
        return states_by_name(self.moments)

    def state_of(self, name: str) -> State:
        return self.states.get(name, {})

    def update(
        self,
        name: str,
        factor: float | Tensor,
        lost: tuple[str, ...] = (),
        more_updates: int = 0,
        coupled: float = 0.0,
        added_to_root: float = 0.0,
        sign: float = 1.0,
        rule: str = "",
        lr_factor: float | None = None,
        decay: float | None = None,
        **changes: float,
    ) -> Tensor:
        """The parameter after an update with these deviations from the definition."""
        config = replace(self.config.optimizer, **changes)  # type: ignore[arg-type]
        right = replace(self.optimizer, config=config).settings(name, self.before[name])
        settings = Settings(
            rule or right.rule,
            right.lr_factor if lr_factor is None else lr_factor,
            right.decay if decay is None else decay,
        )
        parameter, gradient = self.before[name].double(), self.step.gradients[name].double() * factor
        state = {key: torch.zeros_like(v) if key in lost else v.clone() for key, v in self.state_of(name).items()}
        if settings.rule == "adamw":
            zero = torch.zeros_like(parameter)
            time = float(state.get("step", torch.zeros(()))) + more_updates
            root = added_to_root * (1 - config.beta2 ** (time + 1)) / config.beta2 if added_to_root else 0.0
            state["step"] = torch.tensor(time, dtype=torch.float64)
            state["exp_avg"] = state.get("exp_avg", zero)
            state["exp_avg_sq"] = state.get("exp_avg_sq", zero) + root
        if settings.rule in MATRIX_RULES and parameter.ndim not in (2, 3):
            return torch.full_like(parameter, torch.nan)
        state = {key: sign * value if key in SIGNED_STATE else value for key, value in state.items()}
        gradient = sign * gradient + coupled * parameter
        optimizer = replace(self.optimizer, config=config)
        after, _ = optimizer.update(name, parameter, gradient, state, self.step.lr, settings)
        return after

    def fits(self, name: str, update: Callable[[str], Tensor]) -> bool:
        return is_update(self.before[name], self.step.parameters[name], update(name))

    def local_norms(self, names: Collection[str] | None = None) -> dict[int, float]:
        """By rank, the norm of the gradients of its own shards of all parameters or of these."""
        squares = dict.fromkeys((rank for regions in self.regions.values() for _, rank in regions), 0.0)
        for name, regions in self.regions.items():
            gradient = self.step.gradients.get(name) if names is None or name in names else None
            for where, rank in regions if gradient is not None else []:
                assert gradient is not None
                squares[rank] += float(gradient[where].double().square().sum())
        return {rank: sqrt(square) for rank, square in squares.items()}


def is_rounded(tensor: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(tensor, tensor.to(dtype).to(tensor.dtype))


def is_update(before: Tensor, found: Tensor, right: Tensor, max_error: float = MAX_ERROR) -> bool:
    """Whether a parameter was updated to `right`, but for the rounding of what is stored."""
    resolution = 4 * torch.finfo(found.dtype).eps * float(found.double().norm())
    change, found_change = right - before.double(), found.double() - before.double()
    error = compare_tensors(Quantity("update", 0), change, found_change, resolution)
    return error.error <= max_error + error.resolution


def updates_by_definition(config: RunConfig, optimizer: ReferenceOptimizer, measured: AssembledTrace) -> set[Quantity]:
    """The updates that the optimizer gives for the recorded gradients. Where a gradient is zero but for rounding, AdamW
    makes a full-size update of its sign, so that such an update may differ from that of the reference.
    """
    right, before, states = set(), measured.trace.initial, states_by_name(measured.moments[0])
    for step in measured.trace.steps:
        norm = global_norm(step.gradients)
        for name, gradient in step.gradients.items() if isfinite(norm) and isfinite(step.loss) else ():
            clipped = gradient.double() * clip_factor(norm, config.optimizer.clip)
            known = states.get(name, {})
            after, states[name] = optimizer.update(name, before[name].double(), clipped, known, step.lr)
            if is_update(before[name], step.parameters[name], after, MAX_DEFINED_ERROR[config.precision.compute]):
                right.add(Quantity("update", step.step, name))
        before = step.parameters
    return right


def states_by_name(moments: Mapping[str, Tensor]) -> dict[str, State]:
    """The optimizer state of every parameter, by `parameter name/key`, as one state per parameter."""
    states: dict[str, State] = {}
    for key, value in moments.items():
        name, _, state_key = key.rpartition("/")
        states.setdefault(name, {})[state_key] = value.double()
    return states
