"""Cards on collectives: what they leave where, what they send, and who implements them."""

from __future__ import annotations

from meshwright_practice.cards.card import Card, Experiment, Knob, Prediction, Relation
from meshwright_practice.cards.claims import claim
from meshwright_practice.references import (
    DISTRIBUTED_DOCS,
    NCCL_COLLECTIVES,
    NCCL_ENVIRONMENT,
    RING_PAPER,
    ZERO_PAPER,
    own_run,
)

CHAPTER = "handbook/collectives.md"


def volumes(picture: str) -> Experiment:
    other = "algorithms" if picture == "collectives" else "collectives"
    return Experiment(
        "communication.collectives:volumes",
        ranks=4,
        knobs=(
            Knob("ranks", (4, 2), "ranks of the group"),
            Knob("kibibytes", (1024, 4096), "size of the vector, D"),
            Knob("picture", (picture, other), "what is drawn: collectives, or algorithms of the all-reduce"),
        ),
    )


EXACT = Relation("every algorithm computes the exact result", "largest_error", "<=", 1e-12)
RING_VOLUME = Relation("the ring sends 2 (N - 1) / N D", "ring_all_reduce_sent", "==", "ring_formula", 1e-9)

CARDS = (
    Card(
        id="all-reduce-or-scatter-and-gather",
        kind="communication",
        question="What is the difference between an all-reduce and a reduce-scatter followed by an all-gather?",
        answer=(
            "In bytes and in the final result, none: a ring all-reduce is a reduce-scatter followed by an all-gather. "
            "The difference is what lies between them. After the reduce-scatter every rank has one part in N of the "
            "sum, and the full tensor need not exist anywhere. Sharded training stops there, updates its shard, and "
            "gathers later, when and as long as the full tensor is needed. So the output placement decides the memory, "
            "and the two halves can be moved apart in time."
        ),
        notes=(
            "D bytes, N ranks: all-reduce 2 (N - 1) / N D per rank, reduce-scatter and all-gather (N - 1) / N D each. "
            "Output: D, D / N, D. Caution on CPU: Gloo implements reduce_scatter_tensor by an all-reduce and keeps one "
            "chunk, so its sockets move the bytes of an all-reduce; with the gather that is 1.5 times as many. The "
            "received bytes in this run are those of the kernel's counters of each rank's own connections, so other "
            "processes do not disturb them."
        ),
        mistake=(
            "Collectives are treated as interchangeable because the sum is the same. Placement of the output is the "
            "point."
        ),
        experiment=volumes("collectives"),
        predictions=(
            Prediction(
                "ring_all_reduce_sent",
                "4 ranks, a vector of D bytes: what does each rank send in a ring all-reduce?",
                "D",
            ),
            Prediction("ring_reduce_scatter_sent", "And in a ring reduce-scatter?", "D"),
            Prediction(
                "gloo_reduce_scatter_received",
                "What do the sockets of a rank receive in Gloo's reduce-scatter?",
                "D",
                0.05,
            ),
        ),
        relations=(
            RING_VOLUME,
            Relation(
                "a reduce-scatter and an all-gather send the same together",
                "ring_scatter_and_gather_sent",
                "==",
                "ring_all_reduce_sent",
            ),
            Relation("a reduce-scatter leaves a part of the sum", "ring_reduce_scatter_output", "==", 0.25),
            Relation("an all-reduce leaves all of it", "ring_all_reduce_output", "==", 1.0),
            Relation(
                "the sockets agree with the count of the ring",
                "ring_all_reduce_received",
                "==",
                "ring_all_reduce_sent",
                0.02,
            ),
            Relation(
                "Gloo's reduce-scatter moves the bytes of its all-reduce",
                "gloo_reduce_scatter_received",
                "==",
                "gloo_all_reduce_received",
                0.02,
            ),
            EXACT,
        ),
        refuted=(
            Relation(
                "the name of a collective tells its traffic: Gloo's reduce-scatter moves (N - 1) / N D",
                "gloo_reduce_scatter_received",
                "==",
                0.75,
                0.1,
            ),
        ),
        sources=(NCCL_COLLECTIVES, RING_PAPER, ZERO_PAPER, own_run("all-reduce-or-scatter-and-gather")),
        items=(64, 65),
        chapter=CHAPTER,
    ),
    Card(
        id="what-nccl-does",
        kind="communication",
        question="What does NCCL do in distributed training, and what does it not do?",
        answer=(
            "NCCL implements collectives and point-to-point transfers between GPUs: given buffers and a group, it "
            "moves and reduces them, and picks an algorithm and a transport for the topology. It decides nothing about "
            "training. Which tensor is reduced, when, over which ranks and in which dtype is the choice of DDP, FSDP "
            "or tensor parallelism. Exchange the library under them, and only speed changes, up to the rounding of "
            "another order of sums."
        ),
        notes=(
            "torch.distributed has backends behind one interface: NCCL for CUDA, Gloo for CPU, others by plug-in. In "
            "this run the same local gradients are summed by Gloo, by a ring and by a tree of our own over send and "
            "receive: bytes per rank and rounds differ, the update of the optimizer is the same. NCCL refuses two "
            "ranks on one GPU. Its choice of algorithm can be seen with NCCL_DEBUG=INFO and restricted by NCCL_ALGO."
        ),
        mistake="NCCL is said to synchronize the training. It has no notion of a gradient or a step.",
        experiment=Experiment(
            "communication.collectives:transports", ranks=4, knobs=(Knob("ranks", (4, 2), "data-parallel ranks"),)
        ),
        claims=(
            claim("Over another transport, the update of the model is the same.", "update_difference", "<=", 1e-12),
            claim("Over another transport, a rank sends the same bytes.", "ring_sent", "==", "tree_sent"),
            claim(
                "Without any transport, each rank's own update would be the same.",
                "local_update_difference",
                "<=",
                1e-12,
            ),
            claim("A tree has fewer rounds than a ring on four ranks.", "tree_rounds", "<", "ring_rounds"),
        ),
        relations=(
            Relation("ring and tree compute the same gradient sum", "gradient_difference", "<=", 1e-12),
            Relation("the update equals that over the backend", "update_difference", "<=", 1e-12),
            Relation("without communication it does not", "local_update_difference", ">", 1e-3),
            Relation("the transports differ in bytes", "ring_sent", "<", "tree_sent"),
            Relation("and in rounds", "tree_rounds", "<", "ring_rounds"),
        ),
        refuted=(Relation("the transport decides what is learnt", "update_difference", ">", 1e-9),),
        sources=(NCCL_COLLECTIVES, NCCL_ENVIRONMENT, DISTRIBUTED_DOCS, own_run("what-nccl-does")),
        items=(54,),
        chapter=CHAPTER,
    ),
    Card(
        id="no-central-server",
        kind="communication",
        question="Does an all-reduce go through a central server? How is it done instead, and why?",
        answer=(
            "No. With a server, one rank would receive and send N - 1 full tensors, and its link would be the limit, "
            "however many ranks there are. Peers exchange pieces directly. In a ring every rank sends to its neighbour "
            "only, all links work at the same time, and each carries less than two tensors. Its weakness is latency, 2 "
            "(N - 1) steps one after the other; a tree takes about 2 log2 N. So libraries choose by message size and "
            "topology."
        ),
        notes=(
            "Busiest rank, N ranks, D bytes: server (N - 1) D out and as much in; ring 2 (N - 1) / N D, the lower "
            "bound; plain binary tree up to 2 D per rank in 2 log2 N rounds. NCCL has rings, double binary trees, and "
            "in-network reduction (NVLink SHARP, CollNet). Parameter servers exist in asynchronous training, which is "
            "another algorithm."
        ),
        mistake="Peer-to-peer is equated with the ring. The ring is one of several algorithms.",
        experiment=volumes("algorithms"),
        predictions=(
            Prediction(
                "server_all_reduce_sent", "4 ranks: what does the busiest rank send if rank 0 acts as a server?", "D"
            ),
            Prediction("ring_all_reduce_rounds", "And how many rounds does the ring take?", "rounds"),
        ),
        relations=(
            Relation("a server sends N - 1 tensors", "server_all_reduce_sent", "==", 3.0),
            Relation("the busiest rank of a ring sends less", "ring_all_reduce_sent", "<", "server_all_reduce_sent"),
            Relation("a ring of four takes six rounds", "ring_all_reduce_rounds", "==", 6),
            Relation("a tree of four takes four", "tree_all_reduce_rounds", "==", 4),
            Relation(
                "all links together carry the same bytes",
                "ring_all_reduce_received_total",
                "==",
                "server_all_reduce_received_total",
                0.02,
            ),
            EXACT,
        ),
        refuted=(
            Relation(
                "the server moves fewer bytes through its link than a ring",
                "server_all_reduce_sent",
                "<=",
                "ring_all_reduce_sent",
            ),
        ),
        sources=(RING_PAPER, NCCL_ENVIRONMENT, own_run("no-central-server")),
        items=(131,),
        chapter=CHAPTER,
    ),
    Card(
        id="collective-placements",
        kind="communication",
        question="What does each rank have before and after an all-reduce, a reduce-scatter and an all-gather?",
        answer=(
            "Read the name. All-reduce: every rank starts with a full tensor of its own, and all end with the full "
            "sum. Reduce-scatter: every rank starts with a full tensor, and ends with one chunk of the sum, each rank "
            "another. All-gather: every rank starts with one chunk, and all end with all chunks, side by side and not "
            "summed. 'Reduce' means summed, 'scatter' one chunk each, 'all' the same everywhere."
        ),
        notes=(
            "N ranks, full tensor D, chunk D / N. Before and after on each rank: all-reduce D -> D; reduce-scatter D "
            "-> D / N; all-gather D / N -> D. All-to-all: D -> D, chunk j of rank i becomes chunk i of rank j, nothing "
            "is summed. Broadcast: one rank's D on all. The run shows numbers: rank r starts with 10 (r + 1) + chunk."
        ),
        mistake="All-gather is said to sum. It only concatenates.",
        experiment=Experiment(
            "communication.collectives:placements", ranks=4, knobs=(Knob("ranks", (4, 2, 3), "ranks of the group"),)
        ),
        predictions=(
            Prediction(
                "all_reduce_first",
                "Four ranks have 10, 20, 30 and 40 in the first place. What has rank 0 there after an all-reduce?",
                "value",
            ),
            Prediction(
                "reduce_scatter_numbers",
                "Each rank starts with four numbers. How many has it after a reduce-scatter?",
                "numbers",
            ),
            Prediction(
                "all_gather_numbers",
                "Each rank starts with one number. How many has it after an all-gather?",
                "numbers",
            ),
        ),
        relations=(
            Relation("an all-reduce leaves the sum", "all_reduce_first", "==", "sum_of_first_chunk"),
            Relation("on all ranks", "all_reduce_equal_on_all_ranks", "==", 1),
            Relation("a reduce-scatter leaves one chunk", "reduce_scatter_numbers", "==", 1),
            Relation("another one on each rank", "reduce_scatter_equal_on_all_ranks", "==", 0),
            Relation("which is summed", "reduce_scatter_first", "==", "sum_of_first_chunk"),
            Relation("an all-gather leaves all chunks", "all_gather_numbers", "==", "ranks"),
            Relation("which are not summed", "all_gather_first", "==", "start_first"),
        ),
        refuted=(Relation("an all-gather sums", "all_gather_first", "==", "sum_of_first_chunk"),),
        sources=(NCCL_COLLECTIVES, DISTRIBUTED_DOCS, own_run("collective-placements")),
        items=(132,),
        chapter=CHAPTER,
    ),
    Card(
        id="ring-all-reduce-bytes",
        kind="communication",
        question="How many bytes does each rank send in a ring all-reduce of D bytes among N ranks?",
        answer=(
            "Two (N - 1) / N times D: a reduce-scatter pass and an all-gather pass, in each of which every rank sends "
            "N - 1 of N chunks. That is D for two ranks, one and a half D for four, and nearly two D for many. The "
            "bytes per rank hardly depend on N, which is why rings scale in bandwidth. The number of steps is 2 (N - "
            "1) and does depend on it."
        ),
        notes=(
            "Time: 2 (N - 1) alpha + 2 (N - 1) / N D / beta, with alpha the latency of one step and beta the bandwidth "
            "of a link. nccl-tests divides by the same factor: bus bandwidth = D / time x 2 (N - 1) / N. No algorithm "
            "without in-network reduction sends less per rank. Check: 2 GB on 8 ranks is 3.5 GB per rank."
        ),
        mistake="The total over all ranks, 2 (N - 1) D, is confused with the bytes of one rank.",
        experiment=volumes("collectives"),
        predictions=(Prediction("ring_all_reduce_sent", "N = 4: how many bytes does each rank send?", "D"),),
        relations=(
            RING_VOLUME,
            Relation("the sockets receive as much", "ring_all_reduce_received", "==", "ring_formula", 0.02),
            Relation("Gloo's all-reduce receives as much", "gloo_all_reduce_received", "==", "ring_formula", 0.02),
            Relation("it takes 2 (N - 1) rounds", "ring_all_reduce_rounds", "==", 6),
            Relation("all ranks together receive 2 (N - 1) D", "ring_all_reduce_received_total", "==", 6.0, 0.02),
        ),
        refuted=(Relation("each rank sends N - 1 times D", "ring_all_reduce_sent", "==", 3.0),),
        sources=(RING_PAPER, own_run("ring-all-reduce-bytes")),
        items=(156,),
        chapter=CHAPTER,
    ),
    Card(
        id="trap-always-a-ring",
        kind="communication",
        question=(
            "True or not: all modern collectives use the ring, and their cost does not depend on the number of GPUs."
        ),
        answer=(
            "Neither. NCCL chooses among rings, trees, and reduction inside the switch, by message size, number of "
            "nodes and hardware. And 2 D (N - 1) / N is only the bandwidth term. A ring also has 2 (N - 1) steps in a "
            "row, so for small messages its time grows linearly with N: 100 KiB at 10 microseconds per step takes 0.14 "
            "ms on 8 ranks and 10 ms on 512. A tree needs about log2 N steps, and that is why it exists."
        ),
        notes=(
            "Ring: 2 (N - 1) alpha + 2 (N - 1) / N D / beta. Pipelined tree: about 2 log2(N) alpha + 2 D / beta, with "
            "less of the bandwidth in practice, so large messages stay on rings. The planner's model "
            "(planner/hardware/links.py) uses rings inside a node and trees for all-reduces across nodes. All-gather "
            "and reduce-scatter stay rings, so FSDP over very many ranks is exposed to latency: one more reason for "
            "hybrid sharding."
        ),
        mistake="The bandwidth term is taken for the cost.",
        experiment=Experiment(
            "communication.links:ring_time",
            knobs=(
                Knob("kibibytes", (100, 10240, 1048576), "size of the message"),
                Knob("ranks", (512, 64, 4096), "the larger group; the smaller one has 8 ranks"),
            ),
        ),
        predictions=(
            Prediction(
                "seconds_large",
                "100 KiB, 10 microseconds per step, 50 GB/s, ring of 512: how long does the all-reduce take?",
                "microseconds",
                0.05,
            ),
            Prediction(
                "wire_large", "How many bytes does each of the 512 ranks send, as a multiple of the message?", "D"
            ),
        ),
        relations=(
            Relation("bytes per rank grow by 14 %", "wire_growth", "==", 1.1406, 0.001),
            Relation("time grows by far more", "growth", ">", 50),
            Relation("nearly all of it is latency", "latency_share_large", ">", 0.9),
            Relation("a tree is faster", "tree_seconds_large", "<", "seconds_large"),
        ),
        refuted=(Relation("the cost does not depend on the number of GPUs", "growth", "<=", 1.2),),
        sources=(NCCL_ENVIRONMENT, RING_PAPER, own_run("trap-always-a-ring")),
        items=(131, 156),
        chapter=CHAPTER,
    ),
)
