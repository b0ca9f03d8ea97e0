"""Cards on which rank has which coordinates of a layout."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import MEGATRON_3D_PAPER, own_run

CARDS = (
    Card(
        id="trap-stage-is-not-a-replica",
        kind="state placement",
        question=(
            "A diagram of TP 2 x PP 2 x DP 2 on two nodes of four GPUs draws node 0 as pipeline stage 0 and as "
            "data-parallel replica 0, node 1 as stage 1 and replica 1. What is wrong?"
        ),
        answer=(
            "A replica is a whole model, so it must contain all stages; a replica with only stage 0 cannot compute a "
            "loss. If node 0 has stage 0 and node 1 has stage 1, then each node has one tensor-parallel pair of each "
            "replica. Replica r is pair r of node 0 together with pair r of node 1. Pipeline transfers cross the "
            "nodes, and the gradient all-reduce runs inside a node, between pairs with the same stage."
        ),
        notes=(
            "Meshwright orders axes from the outermost to the innermost as pipeline, replicate, shard, context, "
            "tensor: rank = (p R + r) T + t with R replicas and T tensor ranks. A replica is the group over pipeline "
            "and tensor: here ranks {0, 1, 4, 5} and {2, 3, 6, 7}. The global batch is divided by the data-parallel "
            "degree, 2, and not by the number of GPUs, 8. Other orders are possible; the one that puts tensor "
            "innermost is near universal."
        ),
        mistake="Two independent axes, stage and replica, are drawn as one.",
        experiment=Experiment(
            "communication.links:placement_table",
            knobs=(
                Knob("tensor", (2, 1), "tensor-parallel degree"),
                Knob("pipeline", (2, 4), "pipeline stages"),
                Knob("replicate", (2, 4), "data-parallel replicas"),
            ),
        ),
        claims=(
            claim("Each replica has one pipeline stage.", "stages_per_replica", "==", 1),
            claim("Each replica is on both nodes.", "nodes_of_a_replica", "==", 2),
            claim("The gradient all-reduce of equal stages stays inside a node.", "nodes_of_replicate_group", "==", 1),
            claim("Pipeline transfers stay inside a node.", "nodes_of_pipeline_group", "==", 1),
        ),
        relations=(
            Relation("every replica has all stages", "fewest_stages_of_a_replica", "==", 2),
            Relation("a replica has four ranks", "ranks_per_replica", "==", 4),
            Relation("node 0 has one stage", "stages_on_node_0", "==", 1),
            Relation("of both replicas", "replicas_on_node_0", "==", 2),
            Relation("tensor-parallel groups stay inside a node", "nodes_of_tensor_group", "==", 1),
            Relation("so do data-parallel groups", "nodes_of_replicate_group", "==", 1),
            Relation("pipelines cross nodes", "nodes_of_pipeline_group", "==", 2),
            Relation("all ranks of a replica read the same samples", "samples_of_replica", "==", 1),
        ),
        refuted=(Relation("replica 0 is stage 0", "stages_per_replica", "==", 1),),
        sources=(MEGATRON_3D_PAPER, own_run("trap-stage-is-not-a-replica")),
        items=(121, 122),
        chapter="handbook/map.md",
    ),
)
