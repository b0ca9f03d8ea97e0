"""Lab: dispatch tokens to experts, and combine what they return. Replace every `raise NotImplementedError`, and save.

The process group exists already. dist.all_to_all_single exchanges integers;
torch.distributed.nn.functional.all_to_all_single exchanges rows and has a gradient.
"""

import torch.distributed as dist  # noqa: F401
from torch import Tensor, nn


def route(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sorts the choices by expert. `chosen` (tokens, 2) has the experts of every token.

    Returns the order of the flattened choices, in which choices of one expert keep their order, and the number of
    choices of each of the `experts`.
    """
    raise NotImplementedError


def moe(tokens: Tensor, chosen: Tensor, gates: Tensor, local_experts: list[nn.Module], experts: int) -> Tensor:
    """Returns, for every token, the sum of gate x output over its two experts.

    `tokens` (tokens, width) and `gates` (tokens, 2) have gradients. `local_experts` are the experts of this rank.
    """
    raise NotImplementedError
