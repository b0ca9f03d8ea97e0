"""A traced model has the parameters of the module, and the FLOPs that torch's flop counter finds on the real module."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from meshwright.core.parallel.infer_spec import infer_parallel_spec
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.records.trace_custom_model import tensor_parallel_dims, trace_workload
from tests.kit.predicted_models import MODELS, config_for, custom_model, sources, summed_loss

SAMPLES = 4
aten = torch.ops.aten


def attention(query, key, value, *_args, out_val, **_kwargs):
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def attention_backward(_gradient, query, key, value, *_args, out_val, **_kwargs):
    """Backward recomputes the scores, and has four more products of the same size."""
    return sdpa_flop_count(query.shape, key.shape, value.shape) * 5 // 2


def grouped_mm(left, right, *_args, out_val, **_kwargs):
    return 2 * left.numel() * right.shape[-1]


CPU_OPERATORS = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    aten._grouped_mm: grouped_mm,
}
"""torch's counter knows these operators on GPUs only."""
for formula in CPU_OPERATORS.values():
    formula._get_raw = True


def counted_flops(name):
    """FLOPs of forward and backward of the real module."""
    objective = custom_model(name).build_objective(torch.device("cpu"), torch.float32)
    samples = [MODELS[name].source[index] for index in range(SAMPLES)]
    batch = [torch.from_numpy(np.stack(column)) for column in zip(*samples, strict=True)]
    with FlopCounterMode(display=False, custom_mapping=CPU_OPERATORS) as counter:
        loss, _ = objective(*batch)
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


def assert_traced_equals_counted(name):
    custom = custom_model(name)
    spec = trace_workload(custom, config_for(), sources(name)).spec
    costs = [spec.before_cost, *(block.cost for block in spec.blocks), spec.after_cost]
    assert {p.name: p.shape for p in spec.parameters} == {n: p.shape for n, p in custom.module.named_parameters()}
    traced = (
        sum(cost.flops.of(SAMPLES) for cost in costs),
        sum(cost.backward_flops.of(SAMPLES) for cost in costs),
    )
    assert traced == pytest.approx(counted_flops(name), rel=0.02)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "CNN"])
def test_traced_parameters_and_flops_equal_those_of_the_module(name):
    assert_traced_equals_counted(name)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_traced_parameters_and_flops_equal_those_of_every_module(name):
    assert_traced_equals_counted(name)


def test_tracing_leaves_the_module_and_the_random_generator_alone():
    custom = custom_model("CNN")
    values = {name: tensor.clone() for name, tensor in custom.module.state_dict().items()}
    state = torch.get_rng_state()
    trace_workload(custom, config_for(), sources("CNN"))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, values[name]) for name, tensor in custom.module.state_dict().items())
    assert all(parameter.grad is None for parameter in custom.module.parameters())


def test_tied_weights_count_once_and_belong_to_the_root_unit():
    spec = trace_workload(custom_model("GPT-2"), config_for(), sources("GPT-2")).spec
    assert spec.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert spec.by_name["lm_head.weight"].unit == "root"


def test_traced_tensor_parallel_dims_are_those_of_transposed_weights():
    """The weights of GPT-2 are (inputs, outputs); the bias of a row-wise layer is replicated."""
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=24, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    custom = CustomModel(model, summed_loss, infer_parallel_spec(model))
    dims = tensor_parallel_dims(custom, custom.build_objective(torch.device("cpu"), torch.float32))
    expected = {"c_fc.weight": 1, "c_fc.bias": 0, "c_proj.weight": 0}
    assert {name.partition("mlp.")[2]: dim for name, dim in dims.items() if ".mlp." in name} == expected
