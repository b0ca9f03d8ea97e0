"""Describes a trainer to the planner: what it keeps in memory, fuses and overlaps, and how fast its kernels are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainerProfile:
    """One generation of one trainer. docs/planner.md lists the fields that are fitted to published runs."""

    name: str
    """name and year, as `plan --replay` prints it"""

    # What the trainer does.
    flash_attention: bool = True
    """attention does not materialize the score matrix"""
    fused_kernels: bool = False
    """norms, activations and residual additions are compiled or hand-fused: fewer memory passes, less is saved"""
    sequence_parallel: bool = True
    """the sequence is sharded over the tensor axis between tensor-parallel matmuls (Megatron's sequence parallelism)"""
    dropout_masks: bool = False
    """dropout masks are saved: one byte per element after attention and after the feed-forward"""
    regathers_in_backward: bool = False
    """inputs of tensor-parallel matmuls are saved sharded, and all-gathered again in backward"""
    selective_policy: Literal["matmuls", "alternate_matmuls", "all_but_scores"] = "matmuls"
    """what selective activation checkpointing saves: outputs of matmuls and attention; of attention and every other
    matmul; or everything except attention scores"""
    torch_native: bool = True
    """FSDP2 units, torch.distributed.pipelining and DTensor; else full parameter and gradient buffers (Megatron)"""
    keeps_stages_unsharded: bool = False
    """FSDP units of pipeline stages stay unsharded through the step"""
    keeps_stage_outputs: bool = True
    """the output of a stage is kept until its backward pass, although the next stage has received it"""
    shards_over_context: bool = False
    """context-parallel ranks share the shards of parameters and optimizer state even without data parallelism"""
    experts_over_tensor_axis: bool = False
    """expert parallelism also uses the ranks of the tensor axis"""
    deduplicates_tokens: bool = False
    """a token that is routed to several experts of another node is sent to that node once"""
    saves_quantized_inputs: bool = False
    """matmuls that run in 8 bits save their inputs for backward in 8 bits"""
    all_reduces_gradients: bool = False
    """gradients of a sharded optimizer are all-reduced, not reduce-scattered"""
    compresses_gradients: bool = False
    """DDP all-reduces gradients in bfloat16, whatever their dtype is (torch's bf16_compress_hook)"""
    single_adapter_gathers: bool = False
    """parameters that are gathered unit by unit go through one network adapter per node"""
    scatters_stage_outputs: bool = False
    """messages between stages are sharded over the tensor axis, and gathered after they arrive"""
    splits_batch_by_stage: bool = False
    """the batch of a rank is split into as many micro-batches as there are pipeline stages"""
    unoverlapped_data_comm: bool = False
    """gradients are reduced and parameters gathered after the computation of the step, not during it"""
    default_sharding: str = "none"
    """what is sharded over data-parallel ranks if a record does not say: none, optimizer, gradients or parameters"""
    context_method: str = "ring"
    """context parallelism: ring, all-to-all or gather"""

    # Bytes that it keeps or sends.
    parameter_bytes: float = 4
    """bytes per stored parameter"""
    compute_copy_bytes: float = 0
    """bytes per parameter of a copy in the compute precision that lives through the step; 0 if it is made when used"""
    gradient_bytes: float = 4
    """bytes per stored gradient"""
    accumulation_bytes: float = 0
    """bytes per parameter of a second, unsharded gradient in which micro-batches are accumulated"""
    optimizer_bytes: float = 8
    """bytes of optimizer state per parameter, with master weights if they are not the stored parameters"""
    master_bytes: float = 0
    """bytes per parameter of master weights that come on top of `optimizer_bytes`: those of a Meshwright run whose
    weights are in the compute precision"""
    residual_bytes: float = 4
    """bytes per element of the residual stream between blocks; 0 for the compute precision"""
    logit_bytes: float = 0
    """bytes per logit at the peak of the loss; 0 for eager cross-entropy in float32"""
    loss_chunk_bytes: float = 0
    """bytes of the logits of one chunk of tokens, if the loss computes its gradients chunk by chunk in forward; 0 if it
    does not"""
    bucket_bytes: float = 0
    """bytes of the buffers in which gradients and parameters are communicated"""
    communicator_bytes: float = 0
    """bytes that the collective library takes per process group"""
    device_context_bytes: float = 0
    """bytes on the device before the first tensor: CUDA context, kernels, workspaces"""
    allocator_slack: float = 0
    """memory that the allocator reserves beyond its tensors, as a fraction of the transient ones"""
    dispatch_bytes: float = 2
    """bytes per element that is sent to an expert"""
    stage_output_bytes: float = 2
    """bytes per element that is sent to the next stage"""
    reduce_bytes: float = 4
    """bytes per gradient in reductions over data-parallel ranks"""
    gather_bytes: float = 2
    """bytes per parameter in all-gathers over data-parallel ranks"""

    # How fast it is: fitted, unless known.
    residual_traffic_bytes: float = 40
    """memory traffic of a layer's forward per element of the residual stream, besides matmuls, in bytes"""
    ffn_traffic_bytes: float = 12
    """memory traffic of a layer's forward per intermediate element of its feed-forward, in bytes"""
    score_traffic_bytes: float = 16
    """memory traffic of forward per attention score, if scores are materialized, in bytes"""
    loss_traffic_bytes: float = 30
    """memory traffic of the loss per logit, forward and backward together, in bytes"""
    recast_traffic_bytes: float = 0.0
    """memory traffic per parameter in forward for casting parameters to the compute precision, in bytes; twice that in
    backward"""
    quantize_traffic_bytes: float = 0.0
    """memory traffic per quantized element if matmuls run in 8 bits or fewer, in bytes"""
    attention_efficiency: float = 0.5
    """rate of the attention kernel in forward with a head_dim of 128, as a fraction of the matmul rate"""
    post_ampere_attention: float = 1.0
    """fraction of that rate that is left on a GPU newer than the one the kernel was written for (A100)"""
    context_attention_slowdown: float = 1.0
    """factor on attention time under context parallelism"""
    matmul_efficiency: float = 1.0
    """matmul rate of this generation, as a fraction of the device's sustained rate"""
    misalignment_slowdown: float = 1.0
    """factor on the time of a matmul whose rows are not aligned to 16 bytes, beyond today's kernels"""
    layer_launch_seconds: float = 300e-6
    """seconds in which the host launches the forward kernels of one layer"""
    moe_layer_launch_seconds: float = 6e-4
    """seconds in which the host launches the forward kernels of one MoE layer"""
    host_gap_seconds: float = 0.0
    """seconds per layer and pass in which the device waits for the host"""
    tensor_overlap: float = 0.0
    """fraction of tensor-parallel communication that computation hides"""
    data_overlap: float = 1.0
    """fraction of the last backward pass that can hide gradient reductions"""
    pipeline_overlap: float = 0.0
    """fraction of the communication between stages that computation hides"""
    contention: float = 0.06
    """fraction by which computation slows down while a collective runs at the same time"""
    fixed_step_seconds: float = 0.01
    """seconds per step for data loading, gradient clipping and logging"""
