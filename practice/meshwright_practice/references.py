"""Sources that several cards cite: documentation, papers, and own runs. Torch-free."""

from __future__ import annotations

from meshwright_practice.cards.card import Citation

PYTORCH = "https://docs.pytorch.org"

DDP_DOCS = Citation(
    "official",
    "torch.nn.parallel.DistributedDataParallel",
    f"{PYTORCH}/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
)
DDP_NOTES = Citation("official", "Distributed Data Parallel (design notes)", f"{PYTORCH}/docs/stable/notes/ddp.html")
FSDP2_DOCS = Citation(
    "official", "torch.distributed.fsdp.fully_shard", f"{PYTORCH}/docs/stable/distributed.fsdp.fully_shard.html"
)
FSDP2_TUTORIAL = Citation(
    "official",
    "Getting Started with Fully Sharded Data Parallel (FSDP2)",
    f"{PYTORCH}/tutorials/intermediate/FSDP_tutorial.html",
)
FSDP1_DOCS = Citation("official", "FullyShardedDataParallel", f"{PYTORCH}/docs/stable/fsdp.html")
TENSOR_PARALLEL_DOCS = Citation(
    "official", "torch.distributed.tensor.parallel", f"{PYTORCH}/docs/stable/distributed.tensor.parallel.html"
)
DISTRIBUTED_DOCS = Citation("official", "torch.distributed", f"{PYTORCH}/docs/stable/distributed.html")
AUTOGRAD_NOTES = Citation("official", "Autograd mechanics", f"{PYTORCH}/docs/stable/notes/autograd.html")
ZERO_GRAD_DOCS = Citation(
    "official",
    "torch.optim.Optimizer.zero_grad",
    f"{PYTORCH}/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
)
NCCL_COLLECTIVES = Citation(
    "official",
    "NCCL user guide, collective operations",
    "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html",
)
NCCL_ENVIRONMENT = Citation(
    "official",
    "NCCL user guide, environment variables (NCCL_ALGO)",
    "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
)

DDP_PAPER = Citation("paper", "Li et al. 2020, PyTorch Distributed", "arXiv:2006.15704")
ZERO_PAPER = Citation("paper", "Rajbhandari et al. 2019, ZeRO", "arXiv:1910.02054")
FSDP_PAPER = Citation("paper", "Zhao et al. 2023, PyTorch FSDP", "arXiv:2304.11277")
MEGATRON_PAPER = Citation("paper", "Shoeybi et al. 2019, Megatron-LM", "arXiv:1909.08053")
MEGATRON_3D_PAPER = Citation("paper", "Narayanan et al. 2021, Megatron-LM on GPU clusters", "arXiv:2104.04473")
SEQUENCE_PAPER = Citation("paper", "Korthikanti et al. 2022, sequence parallelism", "arXiv:2205.05198")
RING_ATTENTION_PAPER = Citation("paper", "Liu et al. 2023, Ring Attention", "arXiv:2310.01889")
ULYSSES_PAPER = Citation("paper", "Jacobs et al. 2023, DeepSpeed-Ulysses", "arXiv:2309.14509")
GSHARD_PAPER = Citation("paper", "Lepikhin et al. 2020, GShard", "arXiv:2006.16668")
SWITCH_PAPER = Citation("paper", "Fedus et al. 2021, Switch Transformers", "arXiv:2101.03961")
LOCAL_SGD_PAPER = Citation("paper", "Stich 2018, Local SGD", "arXiv:1805.09767")
RING_PAPER = Citation(
    "paper",
    "Patarasuk and Yuan 2009, bandwidth optimal all-reduce algorithms",
    "Journal of Parallel and Distributed Computing 69(2)",
)
BACKPROPAGATION_PAPER = Citation(
    "paper", "Rumelhart, Hinton and Williams 1986, learning representations by back-propagating errors", "Nature 323"
)

PIPELINE_DOCS = Citation("official", "Pipeline Parallelism", f"{PYTORCH}/docs/stable/distributed.pipelining.html")
CHECKPOINT_DOCS = Citation("official", "torch.utils.checkpoint", f"{PYTORCH}/docs/stable/checkpoint.html")
DCP_DOCS = Citation("official", "Distributed Checkpoint", f"{PYTORCH}/docs/stable/distributed.checkpoint.html")
AMP_DOCS = Citation("official", "Automatic Mixed Precision package", f"{PYTORCH}/docs/stable/amp.html")
AMP_EXAMPLES = Citation(
    "official", "Automatic Mixed Precision examples", f"{PYTORCH}/docs/stable/notes/amp_examples.html"
)
DATA_DOCS = Citation("official", "torch.utils.data (DistributedSampler)", f"{PYTORCH}/docs/stable/data.html")
FINFO_DOCS = Citation("official", "torch.finfo", f"{PYTORCH}/docs/stable/type_info.html")
SAVED_TENSORS_TUTORIAL = Citation(
    "official",
    "Hooks for autograd saved tensors",
    f"{PYTORCH}/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html",
)
RANDOMNESS_NOTES = Citation("official", "Reproducibility", f"{PYTORCH}/docs/stable/notes/randomness.html")
PROFILER_DOCS = Citation("official", "torch.profiler", f"{PYTORCH}/docs/stable/profiler.html")
ELASTIC_DOCS = Citation("official", "torchrun (Elastic Launch)", f"{PYTORCH}/docs/stable/elastic/run.html")
DEVICE_MESH_RECIPE = Citation(
    "official", "Getting Started with DeviceMesh", f"{PYTORCH}/tutorials/recipes/distributed_device_mesh.html"
)
NVML_DOCS = Citation(
    "official",
    "NVML API reference, nvmlUtilization_t",
    "https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html",
)

GPIPE_PAPER = Citation("paper", "Huang et al. 2018, GPipe", "arXiv:1811.06965")
PIPEDREAM_PAPER = Citation("paper", "Harlap et al. 2018, PipeDream (1F1B)", "arXiv:1806.03377")
ZERO_BUBBLE_PAPER = Citation("paper", "Qi et al. 2023, zero bubble pipeline parallelism", "arXiv:2401.10241")
CHECKPOINTING_PAPER = Citation(
    "paper", "Chen et al. 2016, training deep nets with sublinear memory cost", "arXiv:1604.06174"
)
MIXED_PRECISION_PAPER = Citation("paper", "Micikevicius et al. 2017, mixed precision training", "arXiv:1710.03740")
BFLOAT16_PAPER = Citation("paper", "Kalamkar et al. 2019, a study of bfloat16 for training", "arXiv:1905.12322")
LARGE_BATCH_PAPER = Citation(
    "paper", "McCandlish et al. 2018, an empirical model of large-batch training", "arXiv:1812.06162"
)
SHARP_MINIMA_PAPER = Citation("paper", "Keskar et al. 2016, on large-batch training", "arXiv:1609.04836")
LINEAR_RATE_PAPER = Citation("paper", "Goyal et al. 2017, accurate, large minibatch SGD", "arXiv:1706.02677")
TRAIN_LONGER_PAPER = Citation("paper", "Hoffer et al. 2017, train longer, generalize better", "arXiv:1705.08741")
AMDAHL_PAPER = Citation(
    "paper", "Amdahl 1967, validity of the single processor approach", "AFIPS Conference Proceedings 30"
)
GUSTAFSON_PAPER = Citation("paper", "Gustafson 1988, reevaluating Amdahl's law", "Communications of the ACM 31(5)")
KARP_FLATT_PAPER = Citation(
    "paper", "Karp and Flatt 1990, measuring parallel processor performance", "Communications of the ACM 33(5)"
)
LLAMA3_PAPER = Citation(
    "paper", "Grattafiori et al. 2024, the Llama 3 herd of models (interruptions of a run)", "arXiv:2407.21783"
)


def own_run(card_id: str) -> Citation:
    """The source of a number that the card's own experiment prints."""
    return Citation("own run", "this card's experiment", f"meshwright practice cards --run {card_id}")
