"""The software of a run as the planner sees it: what it keeps, fuses, overlaps, and how well its kernels do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainerProfile:
    """One generation of one trainer: what it is, what it holds, and how long it takes. What was fitted to published
    runs is listed in docs/planner.md.
    """

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
    residual: float = 4
    """bytes of a number between blocks; 0: as in compute"""
    dropout: bool = False
    """masks of dropout are kept: one byte a number, after attention and after the feed-forward"""
    gathers_again: bool = False
    """what the tensor axis gathers before a matrix is kept in pieces, and gathered again in backward"""
    selective: Literal["products", "half", "attention"] = "products"
    """selective recomputation keeps products and attention, or attention and every other product, or all but scores"""
    torch: bool = True
    """FSDP2's units, torch's pipelines, DTensor; else whole parameters and gradients in buffers, as in Megatron"""
    keeps_stages: bool = False
    """units of a pipeline's stages stay gathered through the step"""
    keeps_outputs: bool = True
    """a stage's output is kept until its backward pass, though the next stage has it"""
    accumulated: float = 0
    """bytes of a second gradient that micro-steps are added up in, whole whatever is sharded"""
    logits: float = 0
    """bytes of a logit at the peak of the loss; 0: cross-entropy step by step in float32"""
    shares_context: bool = False
    """ranks of the context axis share what is sharded also where no other ranks do"""
    folds_tensor: bool = False
    """experts are divided over ranks of the tensor axis, too"""
    bucket: float = 0
    """bytes of buffers in which gradients and parameters travel between ranks that share them"""
    communicator: float = 0
    """bytes that the library of collectives takes for a group of ranks"""
    slack: float = 0
    """what the allocator holds beyond its tensors, as a share of those that come and go"""
    context: float = 0
    """bytes of the device before the first tensor: kernels, handles, workspaces"""
    wide: float = 40
    """bytes that a layer's forward moves for each number of the residual stream, beside its products"""
    inner: float = 12
    """bytes that a layer's forward moves for each inner number of its feed-forward"""
    scores: float = 16
    """bytes that forward moves for each score, where attention has a matrix of scores"""
    loss: float = 30
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
    one_adapter: bool = False
    """what is gathered unit by unit goes through one adapter of each node"""
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
    sharding: str = "none"
    """what it divides among data-parallel ranks where nobody says"""
    method: str = "ring"
    """how it attends over pieces of sequences"""
    splits: bool = False
    """the batch of a rank is cut into as many micro-batches as there are stages"""
    flat: bool = False
    """gradients and parameters meet after the step's computing, not beside it"""
