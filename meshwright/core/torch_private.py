"""Every private name of torch that Meshwright uses. An upgrade of torch has to check this file only.

torch_private is imported by telemetry, models, optim, parallel and the simulator; nothing else imports a name of torch
that starts with an underscore (tests/core/test_torch_private.py).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._ops import OpOverload
from torch.distributed import _functional_collectives
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from meshwright.core.fake_operators import (
    LazyChunks,
    RunOperator,
    has_wrappers,
    keep_sent_tensors,
    run_fake_operator,
    run_operator,
)

__all__ = [
    "BatchNormBase",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
]
"""Names that are re-exported as they are."""

foreach_norm = torch._foreach_norm
foreach_mul_, foreach_add_ = torch._foreach_mul_, torch._foreach_add_
foreach_lerp, foreach_lerp_ = torch._foreach_lerp, torch._foreach_lerp_
foreach_sign_, foreach_copy_, foreach_zero_ = torch._foreach_sign_, torch._foreach_copy_, torch._foreach_zero_
fused_adamw_ = torch._fused_adamw_

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs on this thread; -1 if none does."""

grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
"""(rows, one matrix per group, offs=end row of each group) -> rows. A public name in newer releases only."""

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
varlen_flash_attention = torch.ops.aten._flash_attention_forward
varlen_flash_attention_backward = torch.ops.aten._flash_attention_backward
cudnn_attention_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
"""The operators behind scaled_dot_product_attention, which also return the log-sum-exp of every query."""


def attention_backends() -> list[SDPBackend]:
    """The order in which scaled_dot_product_attention tries its backends in this process."""
    return _cur_sdpa_kernel_backends(with_priority=True)  # type: ignore[no-any-return]


def use_attention_backends(backends: list[SDPBackend]) -> None:
    """Sets the order in which scaled_dot_product_attention tries its backends in this process. The cache of compiled
    code does not know the order, so it gets a key of its own.
    """
    _sdpa_kernel(list(dict.fromkeys(backends)), set_priority=True)
    torch.compiler.config.cache_key_tag = f"attention {' '.join(backend.name for backend in backends)}"


def default_compile_cache() -> str:
    """The folder in which torch.compile keeps compiled code by default: a folder for temporary files."""
    return default_cache_dir()


def split_graphs_at_buckets(split: bool) -> None:
    """Decides whether torch.compile divides graphs inside of DDP where a gradient bucket is full, so that the bucket is
    reduced during backward. Graphs of blocks end often enough, and buckets smaller than DDP's first one fail there.
    """
    torch._dynamo.config.optimize_ddp = split


def set_recompile_limit(limit: int) -> None:
    """Sets how many graphs torch.compile makes of one function before it runs the function eagerly."""
    torch._dynamo.config.recompile_limit = limit


def hide_user_folders_from_inductor(folders: Iterable[str]) -> None:
    """Starts the Pythons of TorchInductor, which examine the processor and compile, without the current folder and
    these folders of the user on their path: they would run a `ctypes.py` or `sitecustomize.py` that is there.
    """
    from torch._inductor import autotune_process, cpu_vec_isa, utils
    from torch._inductor.compile_worker import subproc_pool

    hidden = {"", *folders}

    def environment() -> dict[str, str]:
        path = os.pathsep.join(folder for folder in sys.path if folder not in hidden)
        return {**os.environ, "PYTHONPATH": os.environ.get("TORCH_CUSTOM_PYTHONPATH", path), "PYTHONSAFEPATH": "1"}

    for module in (utils, autotune_process, cpu_vec_isa, subproc_pool):
        if hasattr(module, "python_subprocess_env"):
            module.python_subprocess_env = environment  # type: ignore[attr-defined]


def inside_backward() -> bool:
    """Whether autograd runs on this thread. A forward pass then is a recomputation by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The process group of a name, as functional collectives carry it."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def recorded_collectives() -> list[dict[str, Any]]:
    """The newest collectives of this process, oldest first, as the flight recorder has them: process group, sequence
    number, name and time. Messages between two ranks are not recorded on Gloo.
    """
    c10d = torch._C._distributed_c10d
    dumps = (getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    entries = [entry for dump in dumps if dump is not None for entry in json.loads(dump()).get("entries", ())]
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def fix_compiled_kernels(fixed: bool) -> None:
    """Decides whether TorchInductor chooses kernels by rules alone. By default it times variants that sum in different
    orders.
    """
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(fixed))  # read when TorchInductor is imported
    if (config := sys.modules.get("torch._inductor.config")) is not None:
        config.deterministic = fixed  # type: ignore[attr-defined]


_wrapped_waits: list[Callable[..., Any]] = []


def wrap_collective_waits(wrapper: Callable[..., Any]) -> None:
    """Replaces the functions that wait for a collective by `wrapper(function, *args)`, in this process and once per
    wrapper: the `wait` of a work handle, that of functional collectives (DTensor), and on CUDA the wait of a stream for
    an event of another one (FSDP2). A wrapper calls those that were there before it, such as the parent's of a fork.
    """
    if wrapper in _wrapped_waits:
        return
    _wrapped_waits.append(wrapper)
    functions = [(dist.Work, "wait"), (_functional_collectives, "wait_tensor"), (torch.cuda.Stream, "wait_event")]
    for owner, name in functions:
        setattr(owner, name, _wrap(getattr(owner, name), wrapper))


def _wrap(function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    return wrapped


def fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """The parameter groups of all FSDP modules."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            has_groups = hasattr(state, "_fsdp_param_groups")  # older releases have at most one group per module
            yield from filter(None, state._fsdp_param_groups if has_groups else [state._fsdp_param_group])


def reset_sharded_parameters(model: nn.Module) -> None:
    """Lets FSDP2 take up the sharded parameters of its modules again after they were replaced."""
    for group in fsdp_groups(model):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()


def keep_reduced_gradients(model: nn.Module) -> None:
    """Lets FSDP2 leave gradients in the dtype of their reduction; by default it casts them to that of parameters."""

    def init_without_cast(group: Any, init: Callable[[], None]) -> None:
        init()
        group._orig_dtype = None

    for group in fsdp_groups(model):
        group._init_mp_dtypes = partial(init_without_cast, group, group._init_mp_dtypes)


def fsdp_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The sharded and unsharded tensors of each FSDP parameter, and the gradients that FSDP2 keeps outside of `.grad`.

    The storage of an unsharded parameter lives as long as the model and is resized to zero on reshard, so a tensor may
    be listed while it is empty.
    """
    for group in fsdp_groups(model):
        if group._partial_reduce_output is not None:
            yield "gradient", group._partial_reduce_output
        for parameter in group.fsdp_params:
            yield "parameter", parameter.sharded_param
            yield from (("parameter", tensor) for tensor in parameter.all_gather_outputs)
            for name in ("_sharded_post_forward_param_data", "_unsharded_param"):
                if getattr(parameter, name, None) is not None:
                    yield "parameter", getattr(parameter, name)
            if parameter.unsharded_accumulated_grad is not None:
                yield "gradient", parameter.unsharded_accumulated_grad


class StageWithFilteredP2P(PipelineStage):
    """A pipeline stage that works on Gloo and on the fake backend.

    Before the first step, torch exchanges a message with each neighbouring stage; older releases also with the rank
    itself where a V turns, which Gloo does not support. Newer releases let all stages vote on whether their shapes are
    known. Ours always are, and on the fake backend there is nobody to vote.
    """

    def receive_buffers(self) -> Iterator[Tensor]:
        """The receive buffers. Torch allocates one per micro-batch, once, and keeps all of them."""
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in (info for chunk in infos.values() for info in chunk):
                buffer = getattr(info, "buffer", None)
                if isinstance(buffer, Tensor):
                    yield buffer

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Tensor:
        return vote_yes() if uses_fake_backend() else super()._warmup_forward_vote(*args, **kwargs)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Tensor:
        return vote_yes() if uses_fake_backend() else super()._warmup_backward_result(*args, **kwargs)


def initialize_stages(schedule: Any, stages: list[Any], kwargs: dict[str, Tensor], target: Tensor) -> None:
    """Does what a pipeline schedule does once, in its first step: the stages allocate their receive buffers."""
    for stage in stages:
        stage.has_backward = True
    initialize = getattr(schedule, "_initialize_stage", None) or schedule._initialize_stages
    initialize((), kwargs, target)


def is_fake(tensor: Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


def storage_id(tensor: Tensor) -> int:
    """The address of a tensor's storage object, which views share; fake tensors have no address of their data."""
    return int(tensor.untyped_storage()._cdata)


def uses_fake_backend() -> bool:
    """Whether the process group is fake, so that other ranks do not exist."""
    return dist.get_backend() == "fake"


def vote_yes() -> Tensor:
    return torch.tensor([1], dtype=torch.int32)


def init_fake_process_group(rank: int, ranks: int) -> None:
    """Initializes a process group in which other ranks do not exist: collectives return at once and change nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def clear_dtensor_cache() -> None:
    """Clears DTensor's sharding propagation cache, which would reuse groups of a destroyed mesh of equal shape."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


class FakeTensors:
    """A FakeTensorMode whose collectives return at once. Tensors made inside `with fake.active(run):` may be used
    outside. `run` runs every other operator.
    """

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        self.mode, self.tensor_class = FakeTensorMode(allow_non_fake_inputs=True), FakeTensor
        self.attributes: dict[torch.device, dict[str, Any]] = {}
        """those of a new fake tensor, by device"""

    @contextmanager
    def active(self, run: RunOperator = run_operator) -> Iterator[None]:
        with self.mode, FakeOperatorMode(partial(run_fake_operator, run)):
            yield

    def new(self, size: Any, stride: Any, dtype: Any, device: Any, base: Tensor | None, offset: int) -> Tensor:
        """A fake tensor, or a view of the storage of `base`. The constructor of fake tensors takes several times as
        long as an operator on a small real tensor, so it is called once per device, and its result copied.
        """
        with torch._C._DisableTorchDispatch():
            if base is None:
                meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            else:
                meta = torch.empty((0,), dtype=dtype, device="meta").set_(base.untyped_storage(), offset, size, stride)
            if (attributes := self.attributes.get(device)) is None:
                example = self.tensor_class(self.mode, torch.empty((0,), device="meta"), device)
                attributes = self.attributes[device] = dict(vars(example))
            tensor = Tensor._make_subclass(
                self.tensor_class, meta, False, dispatch_device=True, device_for_backend_keys=device
            )
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        vars(tensor).update(attributes)
        return tensor

    @staticmethod
    def run_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the kernel of an operator that reads no data, without asking the mode for a result."""
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)


class FakeOperatorMode(TorchDispatchMode):
    """Runs operators on fake tensors by a function instead of torch's kernels. Nothing is compiled inside, and the mode
    does without the wrapper that keeps torch.compile out, which takes longer than the mode itself.
    """

    supports_higher_order_operators = True

    def __init__(self, run: RunOperator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is device_of:  # C++ asks for the device of every tensor that it differentiates
            return args[0].fake_device
        if has_wrappers(types):
            return NotImplemented
        return self.run(func, args, kwargs or {})


device_of = torch.ops.prim.device.default


@contextmanager
def patched_for_simulation() -> Iterator[None]:
    """Patches torch where it is wrong or slow on fake tensors: FSDP2's chunking and the lifetime of sent tensors.
    DTensor takes fake tensors as a sign of compilation, and then does not cache its sharding propagation; transformers
    does too, and then builds masks that a real step does without.
    """
    tracing = "_are_we_tracing"
    names = [name for name in sys.modules if name.startswith("torch.distributed")]
    changes: list[tuple[str, str, Any]] = [
        ("torch.distributed.fsdp._fully_shard._fsdp_param", "_chunk_with_empty", LazyChunks),
        ("torch.distributed.pipelining.schedules", "_batch_p2p", keep_sent_tensors(schedules._batch_p2p)),
        ("transformers.utils.import_utils", "is_fake_tensor", lambda _tensor: False),
        *((name, tracing, lambda: False) for name in names if tracing in vars(sys.modules[name])),
    ]
    patches = [(sys.modules[name], attribute, to) for name, attribute, to in changes if name in sys.modules]
    originals = [getattr(module, attribute) for module, attribute, _ in patches]
    for module, attribute, to in patches:
        setattr(module, attribute, to)
    try:
        yield
    finally:
        for (module, attribute, _), original in zip(patches, originals, strict=True):
            setattr(module, attribute, original)


def scaled_mm(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    out_dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """Multiplies two float8 matrices, each with its scale or one scale per row (per column on the right), by the kernel
    that torch's float8 training uses. `fast` sums in the precision of the tensor cores.
    """
    return torch._scaled_mm(
        left, right, scale_a=scale_left, scale_b=scale_right, out_dtype=out_dtype, use_fast_accum=fast
    )


def inductor_with_memory_budget(budget: float) -> Callable[..., Any]:
    """The compiler backend "inductor", which keeps this fraction of activation memory for backward. torch has it as a
    setting of the process that is read while a graph is compiled.
    """

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return backend
