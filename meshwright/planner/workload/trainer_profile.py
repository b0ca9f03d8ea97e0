"""Describes a trainer to the planner: what it keeps in memory, fuses and overlaps, and how fast its kernels are."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
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
    selective_policy: Literal["matmuls", "alternate_matmuls", "all_but_scores", "all_but_pointwise"] = "matmuls"
    """what selective activation checkpointing saves: outputs of matmuls and attention; of attention and every other
    matmul; everything except attention scores; or everything except outputs of norms and activation functions"""
    interleaves: bool = False
    """a rank usually has several pipeline stages, so that a record that does not state their number may have them"""
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
    recomputes_latent_projections: bool = False
    """queries, keys and values of latent attention are not saved, and projected up again in backward"""
    defers_matmuls_only: bool = False
    """between the two parts of a split backward pass, only inputs and output gradients of matmuls are kept; else, as in
    torch.distributed.pipelining, everything that forward saved as well"""
    recomputes_gated_product: bool = False
    """the product of gate and up is not saved: the fused backward kernel of the activation writes it again"""
    offloads_optimizer: bool = False
    """the optimizer state is in host memory, and the host updates the parameters"""
    float8_recipe: Literal["tensorwise", "rowwise", "blockwise"] = "tensorwise"
    """scales of 8-bit matmuls; `quantize_traffic_bytes` is the traffic of tensorwise casts"""
    quantizes_experts: bool = True
    """where other matmuls of blocks run in 8 bits or fewer, those of routed experts do, too; else these and their
    router stay in 16 bits"""
    fused_experts: bool = False
    """the matmuls, the activation and the casts of routed experts are one kernel: their intermediates move less"""
    default_sharding: str = "none"
    """what is sharded over data-parallel ranks if a record does not say: none, optimizer, gradients or parameters"""
    context_method: str = "ring"
    """context parallelism: ring, all-to-all or gather"""

    # Bytes that it keeps or sends.
    parameter_bytes: float = 4
    """bytes per stored parameter"""
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
    saved_token_copies: int = 0
    """copies of a routed token that are saved for backward; 0 for those of torch modules: two, and three with expert
    parallelism"""
    attention_output_bytes: float = 0
    """bytes per saved element of the output of attention, if attention and the projection after it share one copy in
    another format; 0 for the compute precision, beside the quantized input of the projection"""
    activation_input_bytes: float = 0
    """bytes per saved element of gate and up, the inputs of the activation function; 0 for the compute precision"""
    dispatch_bytes: float = 0
    """bytes per element that is sent to an expert; 0 for the compute precision"""
    stage_output_bytes: float = 2
    """bytes per element that is sent to the next stage"""
    reduce_bytes: float = 4
    """bytes per gradient in reductions over data-parallel ranks"""
    reduces_bf16_in_float32: bool = False
    """bf16 gradients are reduced in float32, whatever `reduce_bytes` is, unless parameters are sharded"""
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
    pipeline_overlap: float = 0.0
    """fraction of the communication between stages that computation hides"""
    contention: float = 0.06
    """fraction by which computation slows down while a collective runs at the same time"""
    fixed_step_seconds: float = 0.01
    """seconds per step for data loading, gradient clipping and logging"""
    expert_overlap: float = 0.0
    """fraction of the all-to-alls of experts that run while another micro-batch computes (DualPipe, combined 1F1B)"""
    interleaved_expert_overlap: float = 0.0
    """the same fraction if ranks have several pipeline stages and experts are on several nodes, where trainers that do
    not overlap in general do"""
    graphed_kernels: float = 0.0
    """fraction of the kernels of a layer that CUDA graphs launch"""
    kernel_accuracy: float = 0.085
    """relative accuracy of the predicted computation of a step, half the width of its 80 % interval; wider for a
    trainer with few published runs, and widest for one that is unknown"""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """Computed once: the caches of the cost model look it up often."""
        return self._hash


def with_matmul_precision(profile: TrainerProfile, precision: str) -> TrainerProfile:
    """Returns the profile of a trainer whose matmuls have this precision. Transformer Engine, which the trainers that
    are not torch-native use for matmuls in 8 bits or fewer, saves their quantized inputs.
    """
    if precision in ("fp32", "fp64"):
        return in_32_bits(profile)
    quantizes = precision in ("fp8", "fp4") and not profile.torch_native
    return replace(profile, saves_quantized_inputs=True) if quantizes else profile


def in_32_bits(profile: TrainerProfile) -> TrainerProfile:
    """Returns a profile that stores and sends everything in float32, and therefore needs no copy in float32: of master
    weights and gradients in the optimizer, of accumulated gradients, and of logits.
    """
    has_masters = profile.parameter_bytes < 4
    return replace(
        profile,
        parameter_bytes=4,
        gradient_bytes=4,
        accumulation_bytes=0,
        optimizer_bytes=min(8, profile.optimizer_bytes - 4) if has_masters else profile.optimizer_bytes,
        # Two logits of 16 bits have become two of 32; one of 16 and one of 32 bits are the same tensor now.
        logit_bytes=2 * profile.logit_bytes if profile.logit_bytes <= 4 else 4,
        stage_output_bytes=4,
        reduce_bytes=4,
        gather_bytes=4,
    )


def describe_profile(profile: TrainerProfile) -> str:
    """The name and the year of a profile, and what its users would miss."""
    return profile.name if profile.flash_attention else f"{profile.name}, without flash attention"
