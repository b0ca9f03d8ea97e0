"""Random valid configs over all axes, for tests of what the prover derives from a config."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from hypothesis import strategies as st

from meshwright.base.topology.layout import Layout
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.base.topology.unsupported import min_shard_group_size
from tests.kit.small_run import load_cpu_config


@st.composite
def valid_configs(draw):
    """A valid config over all axes."""
    layout = {axis: draw(st.sampled_from([1, 2, 3, 4, 8, 16])) for axis in ("replicate", "pipeline", "context")}
    layout["tensor"] = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    schedule, method = draw(st.sampled_from(tuple(SCHEDULES))), draw(st.sampled_from(["ring", "all-to-all"]))
    barred = {"gradients"} if layout["pipeline"] > 1 else set()
    barred |= {"parameters"} if layout["pipeline"] > 1 and SCHEDULES[schedule].splits_backward else set()
    shard = draw(st.sampled_from(sorted({"none", "optimizer", "gradients", "parameters"} - barred)))
    degree = draw(st.sampled_from([None, 2, 3, 4, 16])) if shard != "none" else None
    config = load_cpu_config()
    mesh = Layout.from_config(replace(config.layout, **layout, shard=shard, shard_degree=degree))
    layout["expert"] = draw(
        st.sampled_from([n for n in range(1, mesh.expert_axes_size + 1) if mesh.expert_axes_size % n == 0])
    )
    replicates_shards = layout["pipeline"] > 1 or layout["tensor"] > 1
    shared = min_shard_group_size(replace(mesh, expert=layout["expert"]))
    keeps = [True, False] if replicates_shards or shared < 2 else [True, False, shared]
    stages = draw(st.integers(SCHEDULES[schedule].min_stages, SCHEDULES[schedule].max_stages or 4))
    tensor, context = layout["tensor"], layout["context"]
    kv_heads = tensor * draw(st.sampled_from([1, 2, 3]))
    heads = lcm(kv_heads, tensor * (context if method == "all-to-all" else 1)) * draw(st.sampled_from([1, 2, 8]))
    model = replace(
        config.model,
        vocab=tensor * draw(st.integers(2, 200)),
        width=heads * draw(st.sampled_from([2, 8, 128])),
        layers=layout["pipeline"] * stages + draw(st.integers(0, 5)),
        heads=heads,
        kv_heads=kv_heads,
        ffn=tensor * draw(st.integers(1, 100)),
        experts=layout["expert"] * draw(st.integers(1, 3)) if layout["expert"] > 1 else draw(st.integers(0, 9)),
        experts_active=1,
        experts_shared=draw(st.integers(0, 2)),
        separator=draw(st.sampled_from([None, 1])),
    )
    model = replace(model, experts_active=draw(st.integers(1, model.experts or 2)))
    return replace(
        config,
        model=model,
        layout=replace(config.layout, **layout, shard=shard, shard_degree=degree),
        pipeline=replace(config.pipeline, schedule=schedule, stages=stages),
        context=replace(config.context, method=method),
        data=replace(config.data, sequence=2 * tensor * context * draw(st.integers(1, 9))),
        batch=replace(config.batch, global_=mesh.data_degree * 2 * layout["pipeline"], micro=1),
        fsdp=replace(config.fsdp, reshard_after_forward=draw(st.sampled_from(keeps))),
    )
