"""Weights that the first and the last pipeline stage share, such as those of the embedding and the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.parallel.local_shard import local_tensor
from meshwright.errors import ConfigError

FIRST, LAST = -1, -2
"""the stages of modules outside of the blocks"""

Slot = tuple[nn.Module, str]
"""a module and the attribute of its parameter"""


@dataclass
class TiedWeight:
    """A parameter in two stages. The stage of its first name owns it: the owner receives the gradient of the copy, and
    sends the new value back after each update.
    """

    owner_name: str
    copy_name: str
    owner_rank: int
    """the pipeline rank that owns it"""
    copy_rank: int
    owner: Slot | None
    """None on other ranks"""
    tied_copy: Slot | None

    is_trained: bool
    """whether it requires a gradient"""
    is_current: bool = False
    """whether the copy has the value of the owner, which a frozen weight keeps"""

    @torch.no_grad()
    def sum_gradients(self, group: dist.ProcessGroup) -> None:
        if not self.is_trained:
            return
        if self.tied_copy is not None:
            parameter = slot_parameter(self.tied_copy)
            copy_grad = local_gradient(parameter)
            parameter.grad = None
            if self.owner is None:
                dist.send(copy_grad.contiguous(), group=group, group_dst=self.owner_rank)
                return
        if self.owner is not None:
            parameter = slot_parameter(self.owner)
            owner_grad = local_gradient(parameter)
            if self.tied_copy is None:
                copy_grad = torch.empty_like(owner_grad)
                dist.recv(copy_grad, group=group, group_src=self.copy_rank)
            owner_grad += copy_grad

    @torch.no_grad()
    def broadcast_value(self, group: dist.ProcessGroup) -> None:
        if self.is_current:
            return
        self.is_current = not self.is_trained
        owner = local_tensor(slot_parameter(self.owner)) if self.owner is not None else None
        tied_copy = local_tensor(slot_parameter(self.tied_copy)) if self.tied_copy is not None else None
        if owner is not None and tied_copy is not None:
            tied_copy.copy_(owner)
        elif owner is not None:
            dist.send(owner.contiguous(), group=group, group_dst=self.copy_rank)
        elif tied_copy is not None:
            dist.recv(tied_copy, group=group, group_src=self.owner_rank)


def slot_parameter(slot: Slot) -> nn.Parameter:
    parameter = slot[0]._parameters[slot[1]]
    assert parameter is not None
    return parameter


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """The local shard of a gradient; zeros where a step has not used the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return local_tensor(parameter.grad)


def separate_tied_weights(
    model: nn.Module, blocks: list[nn.Module], after: list[nn.Module], ranks: tuple[int, int], local: tuple[bool, bool]
) -> list[TiedWeight]:
    """Finds the parameters that the first and the last stage share, and gives the one that does not own it a copy.

    `ranks` are the pipeline ranks of the first and the last stage, and `local` says whether this rank has them.
    """
    places = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}
    places |= {id(module): LAST for part in after for module in part.modules()}
    uses: dict[int, list[tuple[int, str, Slot]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                uses.setdefault(id(parameter), []).append((places.get(id(module), FIRST), name, (module, attribute)))
    tied = []
    for group in uses.values():
        if len({place for place, _, _ in group}) == 1:
            continue
        if inside := [name for place, name, _ in group if place not in (FIRST, LAST)]:
            raise ConfigError(
                f"layout.pipeline: the parameter {inside[0]} of a block is shared with another module, which may be in "
                "another stage",
                "expected parameters to be shared only between modules outside of the blocks",
            )
        (owner, owner_name, owner_slot), *_ = group
        copies = [(name, slot) for place, name, slot in group if place != owner]
        has_owner, has_copy = local if owner == FIRST else local[::-1]
        owner_rank, copy_rank = ranks if owner == FIRST else ranks[::-1]
        original = slot_parameter(owner_slot)
        if has_copy:
            duplicate = nn.Parameter(original.detach().clone(), original.requires_grad)
            for _, (module, attribute) in copies:
                module._parameters[attribute] = duplicate
        tied.append(
            TiedWeight(
                owner_name,
                copies[0][0],
                owner_rank,
                copy_rank,
                owner_slot if has_owner else None,
                copies[0][1] if has_copy else None,
                original.requires_grad,
            )
        )
    return tied
