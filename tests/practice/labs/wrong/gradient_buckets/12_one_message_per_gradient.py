"""Makes buckets, but starts one all-reduce per gradient. Expected check: messages."""
# ruff: noqa: F401

import torch.distributed as dist
from meshwright_practice.labs.gradient_buckets.solution import make_buckets


def attach_hooks(buckets):
    state = {"works": [], "parameters": [parameter for bucket in buckets for parameter in bucket]}
    for parameter in state["parameters"]:
        parameter.register_post_accumulate_grad_hook(
            lambda ready: state["works"].append(dist.all_reduce(ready.grad, async_op=True))
        )
    return state


def finish(state):
    for work in state["works"]:
        work.wait()
    state["works"].clear()
    for parameter in state["parameters"]:
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
