"""Resets the gradients before every backward. Expected check: gradients."""

import torch.distributed as dist
from meshwright_practice.labs.pipeline_1f1b.solution import receive, schedule


def pipeline_step(module, inputs, targets, loss, shape):
    stage, stages = dist.get_rank(), dist.get_world_size()
    first, last = stage == 0, stage == stages - 1
    alive, losses, sends = {}, [], []
    for action, i in schedule(stage, stages, len(inputs)):
        if action == "F":
            received = inputs[i] if first else receive(shape, stage - 1).requires_grad_()
            output = module(received)
            if last:
                output = loss(output, targets[i])
                losses.append(output.detach())
            else:
                sends.append(dist.isend(output.detach(), stage + 1))
            alive[i] = received, output
        else:
            received, output = alive.pop(i)
            module.zero_grad()
            output.backward(None if last else receive(shape, stage + 1))
            if not first:
                sends.append(dist.isend(received.grad, stage - 1))
            del received, output
    for work in sends:
        work.wait()
    return losses
