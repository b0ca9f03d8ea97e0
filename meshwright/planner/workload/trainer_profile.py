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
    flash_attention: bool = True
    """attention without its matrix of scores"""
    fused_kernels: bool = False
    """norms, activations and residual sums in compiled or hand-written kernels: fewer passes over memory, less kept"""
    sequence_parallel: bool = True
    """the sequence is divided between the matrices that the tensor axis divides"""
    parameter_bytes: float = 4
    """bytes a parameter is held in"""
    compute_copy_bytes: float = 0
    """bytes of a second copy in the precision of compute, kept through the step; 0: made when it is used"""
    gradient_bytes: float = 4
    """bytes a gradient is held in"""
    optimizer_bytes: float = 8
    """bytes of the optimizer a parameter, master weights included where they are not the weights"""
    residual_bytes: float = 4
    """bytes of a number between blocks; 0: as in compute"""
    dropout_masks: bool = False
    """masks of dropout are kept: one byte a number, after attention and after the feed-forward"""
    regathers_in_backward: bool = False
    """what the tensor axis gathers before a matrix is kept in pieces, and gathered again in backward"""
    selective_policy: Literal["matmuls", "alternate_matmuls", "all_but_scores"] = "matmuls"
    """selective recomputation keeps products and attention, or attention and every other product, or all but scores"""
    torch_native: bool = True
    """FSDP2's units, torch's pipelines, DTensor; else whole parameters and gradients in buffers, as in Megatron"""
    keeps_stages_unsharded: bool = False
    """units of a pipeline's stages stay gathered through the step"""
    keeps_stage_outputs: bool = True
    """a stage's output is kept until its backward pass, though the next stage has it"""
    accumulation_bytes: float = 0
    """bytes of a second gradient that micro-steps are added up in, whole whatever is sharded"""
    logit_bytes: float = 0
    """bytes of a logit at the peak of the loss; 0: cross-entropy step by step in float32"""
    shards_over_context: bool = False
    """ranks of the context axis share what is sharded also where no other ranks do"""
    experts_over_tensor_axis: bool = False
    """experts are divided over ranks of the tensor axis, too"""
    bucket_bytes: float = 0
    """bytes of buffers in which gradients and parameters travel between ranks that share them"""
    communicator_bytes: float = 0
    """bytes that the library of collectives takes for a group of ranks"""
    allocator_slack: float = 0
    """what the allocator holds beyond its tensors, as a share of those that come and go"""
    device_context_bytes: float = 0
    """bytes of the device before the first tensor: kernels, handles, workspaces"""
    residual_traffic_bytes: float = 40
    """bytes that a layer's forward moves for each number of the residual stream, beside its products"""
    ffn_traffic_bytes: float = 12
    """bytes that a layer's forward moves for each inner number of its feed-forward"""
    score_traffic_bytes: float = 16
    """bytes that forward moves for each score, where attention has a matrix of scores"""
    loss_traffic_bytes: float = 30
    """bytes that the loss moves for each logit, forward and backward"""
    attention_efficiency: float = 0.5
    """share of the rate of products that attention's kernel reaches in forward, at heads of 128"""
    post_ampere_attention: float = 1.0
    """share of that rate which is left on devices with other instructions than its kernel was written for"""
    context_attention_slowdown: float = 1.0
    """how many times longer attention takes where sequences are divided"""
    matmul_efficiency: float = 1.0
    """share of what products reach on a device today that this generation's reached"""
    misalignment_slowdown: float = 1.0
    """how many times more than today a product takes whose rows do not begin at 16 bytes"""
    host_gap_seconds: float = 0.0
    """seconds that the device waits for the host in every layer, forward, backward or again"""
    layer_launch_seconds: float = 300e-6
    """seconds in which the host asks for all the kernels of a layer's forward"""
    moe_layer_launch_seconds: float = 6e-4
    """the same of a layer with experts, which has many more"""
    tensor_overlap: float = 0.0
    """share of the tensor axis' messages behind which something is computed"""
    data_overlap: float = 1.0
    """share of the last backward pass under which gradients may meet"""
    pipeline_overlap: float = 0.0
    """share of the messages between stages behind which something is computed"""
    deduplicates_tokens: bool = False
    """a token that goes to several experts of another node goes there once"""
    dispatch_bytes: float = 2
    """bytes a number that goes to an expert has"""
    stage_output_bytes: float = 2
    """bytes a number that goes to the next stage has"""
    single_adapter_gathers: bool = False
    """what is gathered unit by unit goes through one adapter of each node"""
    all_reduces_gradients: bool = False
    """gradients of which every rank updates a part are summed up on all of them, not scattered"""
    reduce_bytes: float = 4
    """bytes in which gradients meet"""
    gather_bytes: float = 2
    """bytes in which parameters are gathered"""
    contention: float = 0.06
    """share by which computing slows down while a collective runs beside it"""
    fixed_step_seconds: float = 0.01
    """seconds of a step that nothing else explains: data, clipping, logging"""
    recast_traffic_bytes: float = 0.0
    """bytes moved for each weight in forward, twice in backward, where weights are held in more than is computed in"""
    quantize_traffic_bytes: float = 0.0
    """bytes moved for each number that is quantised, where products are in 8 bits or fewer"""
    scatters_stage_outputs: bool = False
    """what passes between stages is divided by the tensor axis all the same, and gathered behind it"""
    default_sharding: str = "none"
    """what it divides among data-parallel ranks where nobody says"""
    context_method: str = "ring"
    """how it attends over pieces of sequences"""
    splits_batch_by_stage: bool = False
    """the batch of a rank is cut into as many micro-batches as there are stages"""
    unoverlapped_data_comm: bool = False
    """gradients and parameters meet after the step's computing, not beside it"""
