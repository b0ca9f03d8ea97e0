"""A model of transformers under the policy objective: layouts that divide it train its logits as one process does."""

from __future__ import annotations

import pytest
import torch

from meshwright.base.topology.unsupported import validate
from meshwright.core.parallel.infer_spec import infer_parallel_spec
from meshwright.core.parallel.local_shard import full_tensor
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.core.torch_private import clear_dtensor_cache
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.rl.policy.policy_model import policy_custom_model
from meshwright.testing import run_ranks
from tests.kit.huggingface_models import SIZES as MODEL_SIZES
from tests.kit.small_run import load_cpu_config
from tests.rl.policy_rollouts import micro_batches, random_groups, random_rows
from tests.rl.test_policy_layouts import ROWS, SEQUENCE, VOCAB, build_policy_step
from tests.rl.test_policy_objective import plain_objective

transformers = pytest.importorskip("transformers")

SETTINGS = [
    f"--data.sequence={SEQUENCE}",
    "--precision.compute=fp64",
    f"--batch.global={ROWS}",
    "--batch.micro=2",
    "--layout.replicate=1",
    "--compile.enabled=false",
    "--rl.objective=grpo",
    "--rl.kl=0.2",
    "--rl.group_size=4",
]
LAYOUTS = {
    "ZeRO-3": ["--layout.replicate=2", "--layout.shard=parameters"],
    "tensor": ["--layout.tensor=2"],
    "context": ["--layout.context=2"],
    "pipeline": ["--layout.pipeline=2"],
}


def small_llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL_SIZES | {"vocab_size": VOCAB})).double()


def policy_config(options=()):
    return load_cpu_config(overrides=[*SETTINGS, *options])


def run_steps(world, configs):
    results = []
    for config in configs:
        clear_dtensor_cache()
        layout, batch = validate(config)
        module = small_llama().eval()  # as from_pretrained returns it
        custom = policy_custom_model(CustomModel(module, None, infer_parallel_spec(module)), config.rl)
        step = build_policy_step(world, config, custom)
        rows = random_rows(config.rl, ROWS, SEQUENCE, VOCAB)
        batches = micro_batches(rows, batch.micro, layout.data_coordinate(world.rank), batch.replicas)
        step.check_context(lambda batches=batches: batches[0])
        _, loss = step.gradient(0, batches, StepClock(world.device, world.heartbeat, 0))
        values = step.objective.measured_values(step.measured.tolist(), rows.valid_targets, "step 0")
        named = step.parallel_model.parameters().items()
        gradients = {name: full_tensor(p.grad) for name, p in named if p.grad is not None}
        results.append((float(loss), values, gradients))
    return results


@pytest.fixture(scope="module")
def alone():
    [[result]] = run_ranks(run_steps, 1, [policy_config()])
    return result


def test_loss_and_metrics_of_a_transformers_model_equal_a_plain_computation(alone):
    config = policy_config().rl
    rows = random_rows(config, ROWS, SEQUENCE, VOCAB)
    with torch.no_grad():
        logits = small_llama()(torch.from_numpy(rows.tokens)).logits
    total, _, metrics = plain_objective(random_groups(ROWS // 4, 4, SEQUENCE, VOCAB), logits.numpy(), config)
    assert alone[0] == pytest.approx(total / rows.valid_targets, rel=1e-6)  # its softmax and norms are in float32
    assert alone[1] == pytest.approx(metrics, rel=1e-6)


def test_gradients_of_a_transformers_model_are_those_of_one_process(alone):
    by_rank = run_ranks(run_steps, 2, [policy_config(options) for options in LAYOUTS.values()], timeout=200.0)
    loss, values, expected = alone
    for index, layout in enumerate(LAYOUTS):
        found = {name: gradient for rank in by_rank for name, gradient in rank[index][2].items()}
        assert found.keys() == expected.keys(), layout
        for rank in by_rank:
            assert rank[index][0] == pytest.approx(loss, rel=1e-6), layout
            assert rank[index][1] == pytest.approx(values, rel=1e-6), layout
        for name, gradient in expected.items():  # float32 inside of the model's own norms and softmax
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8, msg=f"{layout}: {name}")
