"""The software of a run as the planner sees it: what it keeps, fuses, overlaps, and how well its kernels do."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Stack:
    """One generation of one trainer. Constants that were fitted to published runs are listed in docs/planner.md."""

    name: str
    flash: bool = True
    """attention without its matrix of scores"""
    fused: bool = False
    """norms, activations and residual sums in compiled or hand-written kernels: fewer passes over memory, less kept"""
    cut_sequence: bool = True
    """the sequence is divided between the matrices that the tensor axis divides"""
    weights: float = 4
    """bytes a parameter is held in"""
    computed: float = 0
    """bytes of a second copy in the precision of compute, kept through the step; 0: made when it is used"""
    gradients: float = 4
    """bytes a gradient is held in"""
    state: float = 8
    """bytes of the optimizer a parameter, master weights included where they are not the weights"""
    wide: float = 40
    """bytes that a layer's forward moves for each number of the residual stream, beside its products"""
    inner: float = 12
    """bytes that a layer's forward moves for each inner number of its feed-forward"""
    scores: float = 16
    """bytes that forward moves for each score, where attention has a matrix of scores"""
    logits: float = 30
    """bytes that the loss moves for each logit, forward and backward"""
    attention: float = 0.5
    """share of the rate of products that attention's kernel reaches in forward, at heads of 128"""
    newer: float = 1.0
    """share of that rate which is left on devices with other instructions than its kernel was written for"""
    pieces: float = 1.0
    """how many times longer attention takes where sequences are divided"""
    products: float = 1.0
    """share of what products reach on a device today that this generation's reached"""
    misaligned: float = 1.0
    """how many times more than today a product takes whose rows do not begin at 16 bytes"""
    selective: float = 0.0
    """share of the products that selective recomputation repeats"""
    gap: float = 0.0
    """seconds that the device waits for the host in every layer, forward, backward or again"""
    host: float = 300e-6
    """seconds in which the host asks for all the kernels of a layer's forward"""
    host_experts: float = 6e-4
    """the same of a layer with experts, which has many more"""
    tensor_hidden: float = 0.0
    """share of the tensor axis' messages behind which something is computed"""
    data_hidden: float = 1.0
    """share of the last backward pass under which gradients may meet"""
    sends_hidden: float = 0.0
    """share of the messages between stages behind which something is computed"""
    deduplicates: bool = False
    """a token that goes to several experts of another node goes there once"""
    exchange: float = 2
    """bytes a number that goes to an expert has"""
    passed: float = 2
    """bytes a number that goes to the next stage has"""
    all_reduces: bool = False
    """gradients of which every rank updates a part are summed up on all of them, not scattered"""
    reduced: float = 4
    """bytes in which gradients meet"""
    gathered: float = 2
    """bytes in which parameters are gathered"""
    contended: float = 0.06
    """share by which computing slows down while a collective runs beside it"""
    step: float = 0.01
    """seconds of a step that nothing else explains: data, clipping, logging"""
    recast: float = 0.0
    """bytes moved for each weight in forward, twice in backward, where weights are held in more than is computed in"""
    cast: float = 0.0
    """bytes moved for each number that is quantised, where products are in 8 bits or fewer"""
    scatters: bool = False
    """what passes between stages is divided by the tensor axis all the same, and gathered behind it"""
    ends_are_layers: bool = False
    """embedding and head count as layers where stages are divided"""
    sharding: str = "none"
    """what it divides among data-parallel ranks where nobody says"""
    context: str = "ring"
    """how it attends over pieces of sequences"""
    splits: bool = False
    """the batch of a rank is cut into as many micro-batches as there are samples, where there is a pipeline"""
    once: bool = False
    """sharded parameters of a pipeline's stages are gathered once a step, and stay"""
    flat: bool = False
    """gradients and parameters meet after the step's computing, not beside it"""


OWN = Stack(
    "meshwright",
    wide=80,
    inner=12,
    logits=60,
    attention=0.95,
    recast=9,
    host=1.1e-3,
    host_experts=2e-3,
    passed=4,
    step=4e-3,
)
OWN_COMPILED = replace(OWN, name="meshwright compiled", fused=True, wide=14, inner=4, host=5e-4)

MEGATRON = Stack(
    "Megatron-LM 2021",
    flash=False,
    fused=True,
    cut_sequence=False,
    weights=2,
    gradients=2,
    state=16,
    wide=16,
    inner=9.5,
    scores=9.5,
    logits=110,
    host=1.2e-3,
    reduced=2,
    flat=True,
    scatters=True,
    misaligned=4.3,
    step=0.03,
)
DEEPSPEED = Stack(
    "Megatron-DeepSpeed of BigScience 2022",
    flash=False,
    fused=True,
    cut_sequence=False,
    weights=2,
    gradients=2,
    state=16,
    wide=16,
    inner=9.5,
    scores=9.5,
    logits=110,
    host=1.2e-3,
    reduced=2,
    flat=True,
    ends_are_layers=True,
    all_reduces=True,
    gap=4.1e-3,
    misaligned=4.3,
    step=0.03,
)
COMPOSER = Stack(
    "Composer 2023",
    wide=47,
    inner=9,
    attention=0.46,
    newer=0.65,
    logits=15,
    contended=0.12,
    cast=1.2,
    sharding="parameters",
)
TORCHTITAN = Stack(
    "torchtitan 2024",
    fused=True,
    wide=50,
    inner=13,
    logits=40,
    attention=0.6,
    contended=0.12,
    sharding="parameters",
    context="gather",
    splits=True,
    selective=0.5,
    pieces=1.5,
    tensor_hidden=0.26,
    once=True,
    cast=5.2,
    gathered=2,
)
BRIDGE = Stack(
    "Megatron-Bridge 2026",
    fused=True,
    weights=2,
    gradients=4,
    state=12,
    wide=38,
    inner=8.7,
    attention=0.48,
    products=1.1,
    tensor_hidden=0.8,
    sends_hidden=0.8,
    deduplicates=True,
    sharding="optimizer",
    context="ring",
    cast=3,
    host=60e-6,
    step=0.02,
)

BRIDGE_2025 = replace(BRIDGE, name="Megatron-Bridge-2025", host_experts=1.7e-3)

SOURCES: tuple[tuple[str, Stack], ...] = (
    ("bigscience", DEEPSPEED),
    ("vTrain", MEGATRON),
    ("Narayanan", MEGATRON),
    ("Smith", MEGATRON),
    ("Korthikanti", MEGATRON),
    ("MegaScale", MEGATRON),
    ("mosaicml", COMPOSER),
    ("torchtitan", TORCHTITAN),
    ("Automodel", TORCHTITAN),
    ("fms-fsdp", TORCHTITAN),
    ("(25.", BRIDGE_2025),
    ("Megatron-Bridge", BRIDGE),
    ("NeMo", BRIDGE),
)


def stack_for(source: str, sharding: str, device: str) -> Stack:
    """Of a published run: by who published it, or else by what it did on which devices."""
    for word, stack in SOURCES:
        if word.lower() in source.lower():
            return stack
    if sharding in ("fsdp", "zero3", "zero2"):
        return TORCHTITAN
    return DEEPSPEED if device.startswith("a100") else BRIDGE


def stranger(stack: Stack) -> Stack:
    """The nearest software of somebody else: what one would plan with, had this one never been measured."""
    others = {
        MEGATRON.name: DEEPSPEED,
        DEEPSPEED.name: MEGATRON,
        COMPOSER.name: TORCHTITAN,
        TORCHTITAN.name: COMPOSER,
        BRIDGE_2025.name: TORCHTITAN,
        BRIDGE.name: TORCHTITAN,
    }
    near = others.get(stack.name, stack)
    return replace(
        stack,
        **{name: getattr(near, name) for name in FITTED},
    )


FITTED = (
    "wide",
    "inner",
    "scores",
    "logits",
    "attention",
    "newer",
    "pieces",
    "products",
    "misaligned",
    "gap",
    "host",
    "host_experts",
    "tensor_hidden",
    "sends_hidden",
    "contended",
    "step",
    "cast",
)
"""What of a software is fitted, not known."""
