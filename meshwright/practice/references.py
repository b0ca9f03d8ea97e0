"""Sources that several cards cite: documentation, papers, and own runs. Torch-free."""

from __future__ import annotations

from meshwright.practice.cards.card import Source

PYTORCH = "https://docs.pytorch.org"

DDP_DOCS = Source(
    "official",
    "torch.nn.parallel.DistributedDataParallel",
    f"{PYTORCH}/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
)
DDP_NOTES = Source("official", "Distributed Data Parallel (design notes)", f"{PYTORCH}/docs/stable/notes/ddp.html")
FSDP2_DOCS = Source(
    "official", "torch.distributed.fsdp.fully_shard", f"{PYTORCH}/docs/stable/distributed.fsdp.fully_shard.html"
)
FSDP2_TUTORIAL = Source(
    "official",
    "Getting Started with Fully Sharded Data Parallel (FSDP2)",
    f"{PYTORCH}/tutorials/intermediate/FSDP_tutorial.html",
)
FSDP1_DOCS = Source("official", "FullyShardedDataParallel", f"{PYTORCH}/docs/stable/fsdp.html")
TENSOR_PARALLEL_DOCS = Source(
    "official", "torch.distributed.tensor.parallel", f"{PYTORCH}/docs/stable/distributed.tensor.parallel.html"
)
DISTRIBUTED_DOCS = Source("official", "torch.distributed", f"{PYTORCH}/docs/stable/distributed.html")
AUTOGRAD_NOTES = Source("official", "Autograd mechanics", f"{PYTORCH}/docs/stable/notes/autograd.html")
ZERO_GRAD_DOCS = Source(
    "official",
    "torch.optim.Optimizer.zero_grad",
    f"{PYTORCH}/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
)
NCCL_COLLECTIVES = Source(
    "official",
    "NCCL user guide, collective operations",
    "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html",
)
NCCL_ENVIRONMENT = Source(
    "official",
    "NCCL user guide, environment variables (NCCL_ALGO)",
    "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
)

DDP_PAPER = Source("paper", "Li et al. 2020, PyTorch Distributed", "arXiv:2006.15704")
ZERO_PAPER = Source("paper", "Rajbhandari et al. 2019, ZeRO", "arXiv:1910.02054")
FSDP_PAPER = Source("paper", "Zhao et al. 2023, PyTorch FSDP", "arXiv:2304.11277")
MEGATRON_PAPER = Source("paper", "Shoeybi et al. 2019, Megatron-LM", "arXiv:1909.08053")
MEGATRON_3D_PAPER = Source("paper", "Narayanan et al. 2021, Megatron-LM on GPU clusters", "arXiv:2104.04473")
SEQUENCE_PAPER = Source("paper", "Korthikanti et al. 2022, sequence parallelism", "arXiv:2205.05198")
RING_ATTENTION_PAPER = Source("paper", "Liu et al. 2023, Ring Attention", "arXiv:2310.01889")
ULYSSES_PAPER = Source("paper", "Jacobs et al. 2023, DeepSpeed-Ulysses", "arXiv:2309.14509")
GSHARD_PAPER = Source("paper", "Lepikhin et al. 2020, GShard", "arXiv:2006.16668")
SWITCH_PAPER = Source("paper", "Fedus et al. 2021, Switch Transformers", "arXiv:2101.03961")
LOCAL_SGD_PAPER = Source("paper", "Stich 2018, Local SGD", "arXiv:1805.09767")
RING_PAPER = Source(
    "paper",
    "Patarasuk and Yuan 2009, bandwidth optimal all-reduce algorithms",
    "Journal of Parallel and Distributed Computing 69(2)",
)
BACKPROPAGATION_PAPER = Source(
    "paper", "Rumelhart, Hinton and Williams 1986, learning representations by back-propagating errors", "Nature 323"
)


def own_run(card_id: str) -> Source:
    """The source of a number that the card's own experiment prints."""
    return Source("own run", "this card's experiment", f"meshwright practice cards --run {card_id}")
