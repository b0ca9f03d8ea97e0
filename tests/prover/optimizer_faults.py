"""Seeded faults of optimizers: whole matrices, momentum, parameter groups, weight decay and factored moments."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.core.optim import build, muon
from meshwright.core.optim.adafactor import Adafactor
from meshwright.core.optim.matrix_exchange import MatrixExchange, apply_by_shape
from meshwright.core.optim.muon import Muon
from meshwright.core.optim.sgd import SGD
from tests.prover.seeded_faults import REPLICATE, SHARD_PARAMETERS, UPDATE, fault, map_result, wrap

MUON = (*SHARD_PARAMETERS, "--optimizer.kind=muon")
MUON_REPLICAS = (*REPLICATE, "--optimizer.kind=muon", "--model.experts=2")
GROUPS = (
    *SHARD_PARAMETERS,
    "--optimizer.kind=muon",
    '--optimizer.groups=[{pattern = "*.attention.*", lr_factor = 0.5}, {pattern = "*.ffn.*", lr_factor = 2.0}]',
)
ADAFACTOR = (*SHARD_PARAMETERS, "--optimizer.kind=adafactor")


@fault(MUON, "update of decoder.blocks.0", UPDATE + "every rank updates its own shard by muon, not the whole matrix")
def muon_orthogonalizes_shards(patch):
    def wrong(_self, tensors, function):
        for name, local in tensors.items():
            tensors[name].copy_(function(local[None])[0])

    patch.setattr(MatrixExchange, "map_matrices", wrong)


@fault(MUON, "update of decoder.embedding.weight", UPDATE + "muon updates it, and adamw should")
def muon_updates_the_embedding(patch):
    def wrong(right, config, name, shape, in_block):
        return right(config, name, shape, in_block or "embedding" in name)

    wrap(patch, build, "parameter_settings", wrong)


@fault(MUON, "update of decoder.blocks.0", UPDATE + "weight decay applies to vectors, too")
def weight_decay_applies_to_norms(patch):
    map_result(
        patch,
        build,
        "parameter_settings",
        lambda settings, *_: replace(settings, weight_decay=settings.weight_decay or 0.1),
    )


@fault(MUON, "in step 1", UPDATE + "the momentum is lost")
def muon_loses_its_momentum(patch):
    def wrong(right, self, *rest):
        for state in self.state.values():
            state["momentum"].zero_()
        right(self, *rest)

    wrap(patch, Muon, "step", wrong)


@fault(MUON, "update of decoder.blocks.0.ffn", "gradients and norm are correct, the update is")
def muon_scales_tall_matrices_as_wide_ones(patch):
    wrap(patch, muon, "update_scale", lambda right, kind, shape: right(kind, (min(shape), min(shape))))


@fault(MUON_REPLICAS, "update of decoder.blocks.0.ffn.bank", "gradients and norm are correct, the update is")
def muon_takes_all_experts_for_one_matrix(patch):
    def wrong(matrices, function):
        return {matrix: value / 2 for matrix, value in apply_by_shape(matrices, function).items()}

    def choose(matrices, function):
        by_kind = {kind: {m: v for m, v in matrices.items() if (m.expert is None) == kind} for kind in (True, False)}
        return apply_by_shape(by_kind[True], function) | wrong(by_kind[False], function)

    patch.setattr("meshwright.core.optim.matrix_exchange.apply_by_shape", choose)


@fault(GROUPS, "update of decoder.blocks.0.attention", UPDATE + "the learning rate has the factor 2 of another group")
def parameter_has_the_learning_rate_of_another_group(patch):
    def wrong(settings, *_):
        return replace(settings, lr_factor=2.0) if settings.lr_factor == 0.5 else settings

    map_result(patch, build, "parameter_settings", wrong)


@fault(ADAFACTOR, "update of", "gradients and norm are correct, the update is")
def adafactor_clips_the_update_of_a_shard(patch):
    calls = []

    def wrong(right, self, parts):
        calls.append(None)
        return right(self, parts) if len(calls) % 2 else iter(parts)

    wrap(patch, Adafactor, "_sum_over_ranks", wrong)


@fault(ADAFACTOR, "in step 1", "gradients and norm are correct, the update is")
def adafactor_counts_from_the_start(patch):
    def wrong(right, self, *rest):
        for state in self.state.values():
            state["step"].zero_()
        right(self, *rest)

    wrap(patch, Adafactor, "step", wrong)


@fault((*REPLICATE, "--optimizer.kind=sgd"), "in step 1", UPDATE + "the momentum is lost")
def sgd_loses_its_momentum(patch):
    def wrong(right, self, *rest):
        for state in self.state.values():
            state["momentum_buffer"].zero_()
        right(self, *rest)

    wrap(patch, SGD, "step", wrong)


@fault((*REPLICATE, "--optimizer.kind=lion"), "update of", "gradients and norm are correct, the update is")
def lion_updates_without_the_sign(patch):
    patch.setattr("meshwright.core.optim.lion.foreach_sign_", lambda tensors: torch._foreach_mul_(tensors, 1.0))
