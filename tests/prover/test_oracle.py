"""The oracle equals transformers, torch.optim and hand-computed values, and so may judge the package."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from meshwright.base.config import IGNORE_INDEX, ModelConfig
from meshwright.base.config.model import OptionTable
from meshwright.core.models.init import build_model, build_on_meta
from meshwright.errors import ConfigError
from meshwright.prover.compare.discrepancy import Difference, Quantity
from meshwright.prover.compare.noise import MIN_NOISE, Tolerances
from meshwright.prover.compare.updates import states_by_name
from meshwright.prover.oracle.decoder import ReferenceDecoder
from meshwright.prover.oracle.equivalent_model import equivalent_parameters
from meshwright.prover.oracle.initial_values import initial_values, parameter_shapes
from meshwright.prover.oracle.optimizer import ReferenceState
from meshwright.prover.oracle.training import train
from tests.kit.small_run import small_config

EXACT = 1e-10
"""Float64 leaves this much between two formulations of the same function."""

MODEL = ModelConfig(vocab=61, width=48, layers=3, heads=6, kv_heads=2, ffn=40, rope_theta=256.0)
"""The frequencies 256^(-i / 4) are powers of two, which float32 represents exactly."""


def random_parameters(model: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Parameters of order one, so that no part of the model is negligible."""
    generator = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(model)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * (0.3 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
    }


def tokens_and_labels(model: ModelConfig, batch: int = 3, sequence: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(model.vocab, (batch, sequence), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = IGNORE_INDEX
    return tokens, labels


def in_float64(huggingface: nn.Module, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """transformers computes norms, rotary angles, routing and the loss in float32; here they are float64."""
    huggingface = huggingface.double().eval()
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name, module in list(huggingface.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(model.width, eps=model.norm_eps, dtype=torch.float64)
            huggingface.get_submodule(name.rpartition(".")[0]).__setattr__(name.rpartition(".")[2], norm)
    return huggingface


def huggingface_settings(model: ModelConfig) -> dict[str, object]:
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie,
        "attn_implementation": "sdpa",
    }


def common_weights(parameters: dict[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """Embedding, norms, attention and head under their names in Llama checkpoints."""
    weights = {
        "model.embed_tokens.weight": parameters["decoder.embedding.weight"],
        "model.norm.weight": parameters["decoder.norm.weight"],
        "lm_head.weight": parameters["decoder.embedding.weight" if model.tie else "head.weight"],
    }
    for index in range(model.layers):
        ours, theirs = f"decoder.blocks.{index}", f"model.layers.{index}"
        weights[f"{theirs}.input_layernorm.weight"] = parameters[f"{ours}.attention_norm.weight"]
        weights[f"{theirs}.post_attention_layernorm.weight"] = parameters[f"{ours}.ffn_norm.weight"]
        for a, b in {"q": "q", "k": "k", "v": "v", "out": "o"}.items():
            weights[f"{theirs}.self_attn.{b}_proj.weight"] = parameters[f"{ours}.attention.{a}.weight"]
    return weights


@pytest.mark.parametrize("tie", [False, True])
def test_dense_decoder_equals_llama_of_transformers(tie, monkeypatch):
    model = replace(MODEL, tie=tie)
    parameters, (tokens, labels) = random_parameters(model), tokens_and_labels(model)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**huggingface_settings(model)))
    weights = common_weights(parameters, model)
    for index in range(model.layers):
        for name in ("gate", "up", "down"):
            weights[f"model.layers.{index}.mlp.{name}_proj.weight"] = parameters[
                f"decoder.blocks.{index}.ffn.{name}.weight"
            ]
    llama = in_float64(llama, model, monkeypatch)
    llama.load_state_dict(weights, strict=True)
    with torch.no_grad():
        expected = llama(tokens, labels=tokens)
        ours = ReferenceDecoder(model).forward(parameters, tokens, labels)
    assert (ours.logits - expected.logits).abs().max() < EXACT
    mean = ours.token_losses.sum() / (labels != IGNORE_INDEX).sum()
    assert abs(mean - expected.loss) < EXACT


def test_experts_equal_mixtral_of_transformers(monkeypatch):
    model = replace(MODEL, experts=5, experts_active=2)
    parameters, (tokens, labels) = random_parameters(model), tokens_and_labels(model)
    keys = {"num_local_experts": model.experts, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**huggingface_settings(model), **keys))
    weights = common_weights(parameters, model)
    for index in range(model.layers):
        bank, mlp = f"decoder.blocks.{index}.ffn.bank", f"model.layers.{index}.mlp"
        parameters[f"decoder.blocks.{index}.ffn.router.bias"].zero_()
        weights[f"{mlp}.gate.weight"] = parameters[f"decoder.blocks.{index}.ffn.router.weight"]
        weights[f"{mlp}.experts.gate_up_proj"] = torch.cat([parameters[f"{bank}.gate"], parameters[f"{bank}.up"]], 1)
        weights[f"{mlp}.experts.down_proj"] = parameters[f"{bank}.down"]
    mixtral = in_float64(mixtral, model, monkeypatch)
    mixtral.load_state_dict(weights, strict=True)
    with torch.no_grad():
        expected = mixtral(tokens, labels=tokens)
        ours = ReferenceDecoder(model).forward(parameters, tokens, labels)
    assert (ours.logits - expected.logits).abs().max() < EXACT


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 10_000.0},
        {"options": OptionTable({"rope_scaling": "linear"})},
        {"options": OptionTable({"rope_scaling": "llama3", "rope_factor": 3.0, "rope_original_context": 64})},
        {"tie": True, "separator": 7},
        {"experts": 4, "experts_active": 3, "experts_shared": 2, "separator": 7},
        {"experts": 4, "experts_active": 1},
        {"experts": 4, "experts_active": 2, "capacity_factor": 0.7},
    ],
)
def test_loss_and_gradients_are_those_of_the_package(settings):
    model = replace(MODEL, **settings)
    parameters, (tokens, labels) = random_parameters(model), tokens_and_labels(model)
    package = build_on_meta(model, torch.float64).to_empty(device="cpu")
    if model.tie:
        package.tie()
    package.load_state_dict(parameters | ({"head.weight": parameters["decoder.embedding.weight"]} if model.tie else {}))
    total, _ = package(tokens, labels)
    total.backward()
    leaves = {name: parameters[name].requires_grad_() for name, _ in package.named_parameters()}
    loss = ReferenceDecoder(model).forward(parameters, tokens, labels).token_losses.sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    assert abs(loss.detach() / total.detach() - 1) < EXACT
    for (name, parameter), gradient in zip(package.named_parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() < EXACT * gradient.abs().max(), name


def test_documents_are_computed_as_if_they_were_alone():
    """A document that starts a sequence gives the logits that it gives without what follows; a later one, those of a
    sequence in which other documents precede it.
    """
    model = replace(MODEL, separator=7)
    parameters, (tokens, labels) = random_parameters(model), tokens_and_labels(model, batch=1, sequence=12)
    tokens[tokens == 7] = 8
    tokens[0, 4] = 7
    other = tokens.clone()
    other[0, :4] = torch.tensor([1, 2, 3, 4])
    decoder = ReferenceDecoder(model)
    first, second = (decoder.forward(parameters, t, labels).logits for t in (tokens, other))
    assert (first[0, 5:] - second[0, 5:]).abs().max() < EXACT
    assert (first[0, 4] - second[0, 4]).abs().max() > 1e-3  # the separator belongs to the document that it ends
    alone = decoder.forward(parameters, tokens[:, :5], labels[:, :5]).logits
    assert (first[0, :5] - alone[0]).abs().max() < EXACT


@pytest.mark.parametrize("separator", [None, 7])
def test_long_sequences_by_query_blocks_equal_one_block(monkeypatch, separator):
    model = replace(MODEL, separator=separator)
    parameters, batch = random_parameters(model), tokens_and_labels(model)
    leaves = [value.requires_grad_() for name, value in parameters.items()]

    def losses_and_gradients():
        losses = ReferenceDecoder(model).forward(parameters, *batch).token_losses
        return losses.detach(), *torch.autograd.grad(losses.sum(), leaves)

    whole = losses_and_gradients()
    monkeypatch.setattr("meshwright.prover.oracle.decoder.LONG_SEQUENCE", 10)
    monkeypatch.setattr("meshwright.prover.oracle.long_attention.SCORES", 24 * 7)
    for a, b in zip(whole, losses_and_gradients(), strict=True):
        assert (a - b).abs().max() < EXACT * a.abs().max()


def test_equivalent_parameters_compute_the_same_function():
    for model in (MODEL, replace(MODEL, tie=True), replace(MODEL, experts=4, experts_shared=1)):
        parameters, batch = random_parameters(model), tokens_and_labels(model)
        decoder = ReferenceDecoder(model)
        changed = equivalent_parameters(parameters, model.tie)
        assert any(not torch.equal(changed[name], parameters[name]) for name in parameters)
        logits = [decoder.forward(values, *batch).logits for values in (parameters, changed)]
        assert (logits[0] - logits[1]).abs().max() < EXACT


def test_expert_of_a_single_choice_is_weighted_by_its_probability():
    model = replace(MODEL, experts=3, experts_active=1)
    block = {
        name.removeprefix("decoder.blocks.0."): value
        for name, value in random_parameters(model).items()
        if "blocks.0." in name
    }
    x = torch.randn(1, 4, model.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    decoder = ReferenceDecoder(model)
    out, balance, load = decoder.experts(block, x)
    scores = x[0] @ block["ffn.router.weight"].mT
    expected = torch.zeros_like(x[0])
    for token, row in enumerate(scores):
        expert = int((row + block["ffn.router.bias"]).argmax())
        matrices = (block[f"ffn.bank.{name}"][expert] for name in ("gate", "up", "down"))
        expected[token] = row.softmax(0)[expert] * decoder.swiglu(x[0, token], *matrices)
    assert (out[0] - expected).abs().max() < EXACT
    frequency = 3 * load / 4
    assert abs(balance[0] - (frequency * scores.softmax(1).mean(0)).sum()) < EXACT


def test_capacity_drops_the_last_tokens_of_an_expert():
    model = replace(MODEL, experts=2, experts_active=1, capacity_factor=0.5)
    chosen = torch.tensor([[0], [0], [1], [0], [0], [0], [0], [1]])
    is_chosen = torch.arange(2) == chosen
    accepted = ReferenceDecoder(model).accept(chosen, is_chosen)  # ceil(0.5 x 8 / 2) = 2 tokens per expert
    assert accepted.nonzero().tolist() == [[0, 0], [1, 0], [2, 1], [7, 1]]


def test_capacity_without_the_samples_of_a_pass_is_refused():
    config = small_config("--model.experts=4", "--model.capacity_factor=1.0")
    with pytest.raises(ConfigError, match="pass_samples"):
        train(config, read_sample, [500], steps=range(1))


def read_sample(sample: int) -> tuple[np.ndarray, np.ndarray]:
    """A sample whose labels are masked after a length that differs from sample to sample."""
    tokens = np.random.Generator(np.random.Philox(key=sample)).integers(0, 256, 17)
    labels = tokens[1:].copy()
    labels[sample % 17 :] = IGNORE_INDEX
    return tokens[:-1], labels


@pytest.mark.parametrize("overrides", [(), ("--model.experts=4", "--model.router_aux_loss=0.5")])
def test_gradient_equals_finite_differences_of_the_loss(overrides):
    config = small_config(*overrides)
    trace = train(config, read_sample, [500], steps=range(1))
    step, change = trace.steps[0], 1e-4
    for name in ("decoder.blocks.1.attention.k.weight", "decoder.blocks.0.ffn_norm.weight", "decoder.embedding.weight"):
        place = tuple(step.gradients[name].abs().flatten().argmax().unsqueeze(0).tolist())
        losses = []
        for sign in (1, -1):
            parameters = {key: value.clone() for key, value in trace.initial.items()}
            parameters[name].view(-1)[place[0]] += sign * change
            result = ReferenceDecoder(config.model).forward(parameters, step.inputs["tokens"], step.inputs["labels"])
            mean = result.token_losses.sum() / step.tokens
            losses.append(float(mean + config.model.router_aux_loss * result.balance.mean() * bool(overrides)))
        slope = (losses[0] - losses[1]) / (2 * change)
        assert slope == pytest.approx(float(step.gradients[name].flatten()[place[0]]), rel=1e-5)


def test_loss_is_the_mean_over_valid_tokens_and_passes_do_not_matter(monkeypatch):
    config = small_config("--optimizer.clip=0")
    whole = train(config, read_sample, [500], steps=range(2))
    step = whole.steps[0]
    result = ReferenceDecoder(config.model).forward(whole.initial, step.inputs["tokens"], step.inputs["labels"])
    assert step.tokens == int((step.inputs["labels"] != IGNORE_INDEX).sum()) == int((result.token_losses > 0).sum())
    assert step.loss == pytest.approx(float(result.token_losses.sum()) / step.tokens, rel=1e-12)
    monkeypatch.setattr("meshwright.prover.oracle.training.ELEMENTS_PER_PASS", 1)
    by_sample = train(config, read_sample, [500], steps=range(2), permute=True)
    for a, b in zip(whole.steps, by_sample.steps, strict=True):
        assert all((a.parameters[name] - b.parameters[name]).abs().max() < EXACT for name in a.parameters)


def test_run_continues_from_a_state_as_if_it_had_not_stopped():
    config = small_config("--model.experts=4", "--eval.every=2")
    whole = train(config, read_sample, [500], steps=range(4))
    first = train(config, read_sample, [500], steps=range(2))
    start = ReferenceState(first.steps[-1].parameters, states_by_name(first.moments))
    second = train(config, read_sample, [500], steps=range(2, 4), start=start)
    assert [step for step, *_ in whole.evaluations] == [1, 3]
    assert whole.evaluations == first.evaluations + second.evaluations
    for name, value in whole.steps[-1].parameters.items():
        assert torch.equal(value, second.steps[-1].parameters[name])


def test_frozen_group_keeps_its_values_in_a_run_that_continues_from_a_recorded_state():
    config = small_config("--eval.every=1", '--optimizer.groups=[{pattern = "*.attention.*", frozen = true}]')
    first = train(config, read_sample, [500], steps=range(1))
    start = ReferenceState(first.steps[-1].parameters, states_by_name(first.moments))
    second = train(config, read_sample, [500], steps=range(1, 2), start=start, dtype=torch.float32)
    [name] = [name for name in first.initial if name.endswith("0.attention.q.weight")]
    assert name not in second.steps[0].gradients
    assert torch.equal(second.steps[0].parameters[name].float(), first.initial[name].float())
    assert len(second.evaluations) == 1


def test_step_that_is_not_finite_changes_nothing():
    config = small_config("--model.experts=4")
    trace = train(config, read_sample, [500], steps=range(3), nonfinite_steps=frozenset({1}))
    assert math.isnan(trace.steps[1].loss)
    assert all(torch.equal(trace.steps[1].parameters[n], value) for n, value in trace.steps[0].parameters.items())
    assert not torch.equal(
        trace.steps[2].parameters["decoder.norm.weight"], trace.steps[1].parameters["decoder.norm.weight"]
    )
    assert float(trace.moments["decoder.norm.weight/step"]) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_differs_from_float64_by_its_rounding(dtype):
    compute = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    config = small_config(f"--precision.compute={compute}", "--precision.loss_scale=1024")
    low = train(config, read_sample, [500], steps=range(1), dtype=torch.float32, autocast=dtype).steps[0]
    exact = train(config, read_sample, [500], steps=range(1)).steps[0]
    resolution = torch.finfo(dtype).eps
    for name, gradient in exact.gradients.items():
        error = float((low.gradients[name].double() - gradient).norm() / gradient.norm())
        assert 0.01 * resolution < error < 4 * resolution, name


def test_tolerance_is_at_least_the_median_noise_over_the_steps_of_a_run_that_is_followed():
    """One step of few seeds may happen to agree with the exact value."""
    noise = [Difference(Quantity("gradient", step, "head.weight"), 0.01 * step, 1.0) for step in (1, 2, 9)]
    followed, by_step = (Tolerances.from_noise(precision, [noise]) for precision in ("bf16", "fp64"))
    assert list(followed.errors.values()) == pytest.approx([5 * 0.02, 5 * 0.02, 5 * 0.09])
    assert list(by_step.errors.values()) == pytest.approx([10.0, 20.0, 90.0])


def test_tolerance_of_a_skipped_step_does_not_have_the_noise_of_the_others():
    factors = 1.0 + 2**-52, 1.04  # the projection of equal values is 1 but for its own rounding
    noise = [
        Difference(Quantity("update", step, "head.weight"), 0.2 * step, factor) for step, factor in enumerate(factors)
    ]
    tolerances = Tolerances.from_noise("bf16", [noise])
    skipped, taken = tolerances.factors.values()
    assert skipped == 5 * MIN_NOISE["bf16"]
    assert taken == pytest.approx(5 * 0.04)
    assert not tolerances.accepts(Difference(Quantity("update", 0, "head.weight"), 0.01, 1.01))


def test_squared_gradients_have_twice_the_rounding_noise():
    noise = [
        Difference(Quantity("moments", 0, f"decoder.norm.weight/{key}"), 0.0, 1.0) for key in ("exp_avg", "exp_avg_sq")
    ]
    first, second = Tolerances.from_noise("bf16", [noise]).factors.values()
    assert second == 2 * first
    gradient = torch.randn(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = gradient.bfloat16().double()
    error, error_of_square = ((a - b).norm() / b.norm() for a, b in ((rounded, gradient), (rounded**2, gradient**2)))
    assert 1.8 < error_of_square / error < 2.2


def test_initial_values_are_those_of_the_package():
    for overrides in (
        ("--model.vocab=1500",),
        ("--model.tie=true",),
        ("--model.experts=3", "--model.experts_shared=2"),
    ):
        config = small_config(*overrides, "--seed=3")
        model = build_model(config.model, config.seed)
        expected = dict(model.named_parameters()) | dict(model.named_buffers())
        values = initial_values(config)
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], value) for name, value in expected.items())
