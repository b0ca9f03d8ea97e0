"""The stages and FSDP units of a pipeline rank, from the architecture and the trainer's bytes per parameter."""

from __future__ import annotations

from meshwright.base.models.architecture import Architecture
from meshwright.planner.cost.units.data_sharding import data_sharding
from meshwright.planner.cost.units.rank_units import BlockRun, RankStage, TensorModules, Unit, UnitGroup, unit_groups
from meshwright.planner.cost.units.stage_parameters import StageLayers, stage_parameters, stages_by_rank
from meshwright.planner.workload.planned_job import PlannedJob


class UnitSizes:
    """The bytes of units from their elements."""

    def __init__(self, job: PlannedJob, compute_bytes: float) -> None:
        self.job, self.compute_bytes = job, compute_bytes
        self.groups = unit_groups(job)
        self.parameter_bytes = job.trainer.parameter_bytes * (2 if job.precision == "fp64" else 1)
        self.trained = job.trained
        self.frozen_bytes = max(4.0, self.parameter_bytes)
        """bytes of a stored frozen parameter, which is not rounded"""
        # The unsharded embedding sets the dtype of the residual stream.
        self.embedding_bytes = self.parameter_bytes if job.trainer.residual_bytes else compute_bytes
        self.gather_bytes = max(job.trainer.gather_bytes, 4.0 if job.precision in ("fp32", "fp64") else 0.0)

    def unit(
        self,
        numel: float,
        first: float = 0.0,
        partial: float = 0.0,
        *,
        share: float = 1.0,
        factors: float = 0.0,
        expert: bool = False,
        embedding: bool = False,
    ) -> Unit:
        """`first` are the elements of gradients that exist at the peak of its backward pass, `share` is the trained one
        of its elements, to which those of low-rank factors come.
        """
        group: UnitGroup = self.groups[1 if expert else 0]
        ranks = group.shards.ranks
        native = self.job.trainer.torch_native
        stored_ranks = ranks if native or self.job.sharding == "parameters" else 1
        trained, frozen = numel * share + factors, numel * (1 - share)
        stored = trained * self.parameter_bytes + (frozen * self.frozen_bytes if frozen else 0.0)
        unsharded = (numel + factors) * self.compute_bytes
        if embedding:
            unsharded = trained * self.embedding_bytes + (frozen * self.frozen_bytes if frozen else 0.0)
        return Unit(
            group,
            stored / stored_ranks,
            unsharded,
            unsharded if native else numel * self.gather_bytes,
            0.0,
            trained,
            trained,
            trained / ranks,
            first=first if share == 1 else min(first, trained),
            partial=partial if self.job.layout.tensor > 1 else 0.0,
            computed=self.embedding_bytes if embedding else 0.0,
        )


def estimated_stages(job: PlannedJob, pipeline_rank: int, sizes: UnitSizes) -> tuple[RankStage, ...]:
    """The stages of a pipeline rank; equal ones are the same object."""
    known: dict[StageLayers, RankStage] = {}
    stages = stages_by_rank(job)[pipeline_rank]
    for layers in stages:
        if layers not in known:
            known[layers] = estimated_stage(job, layers, sizes)
    return tuple(known[layers] for layers in stages)


def estimated_stage(job: PlannedJob, layers: StageLayers, sizes: UnitSizes) -> RankStage:
    layout, model = job.layout, job.model
    no_pipeline, sharding, trained = layout.pipeline == 1, data_sharding(job), job.trained
    apart = sharding.experts_apart
    stage = stage_parameters(model, layers, layout.tensor, layout.expert, no_pipeline, apart)
    runs = []
    for count, moe in ((layers.dense_layers, False), (layers.moe_layers, True)):
        if count:
            one = StageLayers(int(not moe), int(moe), False, False)
            block = stage_parameters(model, one, layout.tensor, layout.expert, no_pipeline, apart)
            experts = None
            if block.block_experts:
                partial = 0.0 if sharding.expert_stride == 1 else block.block_experts
                experts = sizes.unit(block.block_experts, 0.0, partial, share=trained.experts, expert=True)
            repeats = not job.trainer.torch_native or (moe and not model.shared_ffn)
            vectors = model.mean(moe, model.kind_vector_parameters) if isinstance(model, Architecture) else 0.0
            unit = sizes.unit(
                block.block,
                block.down_projection,
                vectors * trained.norms,
                share=block.trained_share(trained),
                factors=trained.factor_elements(layout.tensor),
            )
            runs.append(BlockRun(count, moe, unit, experts, TensorModules(repeats_last_scatter=repeats)))
    tied = model.tied_embeddings and no_pipeline
    embedding = sizes.unit(stage.embedding, share=trained.before, embedding=True) if stage.embedding else None
    norm = model.width * (2 if isinstance(model, Architecture) and model.norm == "layer" else 1)
    head = sizes.unit(stage.head, partial=norm * trained.after, share=trained.after) if stage.head else None
    if tied and embedding is not None:
        return RankStage(layers, None, tuple(runs), None, embedding + head if head is not None else embedding)
    return RankStage(layers, embedding, tuple(runs), head, embedding_frozen=not trained.before)
