"""The proof of a custom model: what the certificate says, what it leaves open, and which axis it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import train
from meshwright.base.config import LayoutConfig, PrecisionConfig
from meshwright.base.topology.unsupported import validate
from meshwright.prover.custom.model_facts import ModelFacts
from meshwright.prover.custom.proof import CustomProof
from meshwright.prover.custom.training import check_custom_training, explain_axes, prepare_custom
from meshwright.prover.oracle.plain_objective import PlainObjective
from meshwright.prover.prove import certify
from meshwright.prover.shrink.custom_runs import custom_runs
from tests.prover import custom_model_faults, custom_plan_faults
from tests.prover.custom_cases import CustomCase
from tests.prover.custom_faults import CUSTOM_FAULTS, REPLICATE
from tests.prover.custom_models import (
    WIDTH,
    Classifier,
    Points,
    Texts,
    TokenModel,
    class_loss,
    pad,
    text_loss,
    token_loss,
)

MODULES = (custom_model_faults, custom_plan_faults)
"""The modules that register the faults."""


def proof(case: CustomCase) -> CustomProof:
    return CustomProof(case.config(), case.subject())


def test_certificate_describes_the_model_that_was_proven():
    described = proof(CustomCase(Classifier(), class_loss, REPLICATE, Points())).describe()
    assert described["class"] == "tests.prover.custom_models.Classifier"
    assert described["parameters"] == sum(p.numel() for p in Classifier().parameters())
    assert described["layout"] == "replicate 2"


def test_loss_that_train_refuses_is_a_failed_claim_and_nothing_is_trained():
    mean = proof(CustomCase(Classifier(), F.cross_entropy, REPLICATE, Points()))
    first = next(mean.check_model())
    assert not first.passed
    assert "mean" in first.measured
    assert not {"training", "recovery"} & mean.checks().keys()
    assert any("`train` refuses the model" in sentence for sentence in mean.not_proven())


class Kept(Classifier):
    """Keeps an auxiliary loss, which has been computed once before."""

    def forward(self, x):
        outputs = super().forward(x)
        self.aux = outputs.square().sum()
        return outputs


def test_auxiliary_loss_that_a_closure_reads_is_a_failed_claim_and_no_error():
    model = Kept()
    model(torch.ones(2, WIDTH))
    kept = proof(CustomCase(model, lambda o, t: class_loss(o, t) + model.aux, REPLICATE, Points()))
    first, *others = kept.check_model()
    assert not first.passed
    assert "an auxiliary loss that forward keeps in aux" in first.measured
    assert any("a copy of the module still computes with" in claim.measured for claim in others)


class Momentum(Classifier):
    """Its teacher follows its student."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.student = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.training:
            self.teacher.weight.data.lerp_(self.student.weight.data, 0.5)
        return super().forward(self.student(x) + self.teacher(x))


def test_momentum_teacher_is_proven_in_one_process_and_not_in_training():
    momentum = proof(CustomCase(Momentum(), class_loss, REPLICATE, Points()))
    assert [claim.measured for claim in momentum.check_model() if not claim.passed] == []
    assert not {"training", "recovery"} & momentum.checks().keys()
    assert any("forward changes teacher.weight in every micro-batch" in sentence for sentence in momentum.not_proven())
    sharded = proof(CustomCase(Momentum(), class_loss, LayoutConfig(replicate=2, shard="optimizer"), Points()))
    assert "the change is lost" in next(sharded.check_model()).measured


def test_what_needs_formulas_of_built_in_models_is_listed_as_not_proven():
    listed = "; ".join(proof(CustomCase(Classifier(), class_loss, REPLICATE, Points())).not_proven())
    assert "initial weights" in listed
    assert "communication volume" in listed
    assert "content of samples" in listed


def test_axis_of_a_fault_is_named(tmp_path):
    case = CUSTOM_FAULTS["outputs divided by the number of ranks"].build()
    of_case = proof(case)
    run = next(run for run in custom_runs(case.config(), float64=True) if run.name == "float64")
    text = explain_axes(case.config(), run, of_case.subject, of_case.facts, tmp_path)
    assert text == "axis: one rank is right, so the replicate axis is the cause"


def test_custom_model_stays_on_its_axes_when_a_proof_run_continues_elsewhere():
    for layout in (LayoutConfig(replicate=2), LayoutConfig(replicate=1, tensor=2), LayoutConfig(replicate=2, tensor=2)):
        config = replace(CustomCase(Classifier(), class_loss, REPLICATE, Points()).config(), layout=layout)
        for run in custom_runs(config, float64=True):
            assert run.config.model == config.model
            assert (run.resume_layout or run.config).layout.tensor in (1, layout.tensor)
            assert (run.resume_layout or run.config).layout.pipeline == 1


@pytest.mark.parametrize("compute", ["fp32", "fp64"])
def test_run_that_continues_on_another_layout_is_one_that_was_compared(compute):
    config = replace(CustomCase(Classifier(), class_loss, REPLICATE, Points()).config(), steps=4)
    *others, resumed = custom_runs(replace(config, precision=PrecisionConfig(compute=compute)), float64=True)
    assert resumed.resume_layout is not None
    assert resumed.config in [run.config for run in others]


def test_expert_axis_keeps_a_degree_that_divides_the_experts_of_the_model():
    layout = LayoutConfig(replicate=2, shard="parameters", expert=2)
    runs = custom_runs(replace(CustomCase(Classifier(), class_loss, layout, Points()).config(), steps=4), float64=True)
    assert {(run.resume_layout or run.config).layout.expert for run in runs} <= {1, 2}
    assert any(run.name == "variation" for run in runs)


def test_batches_that_pad_are_compared_as_the_layout_after_a_resume_divides_them():
    proof_of_texts = proof(CustomCase(TokenModel(), text_loss, REPLICATE, Texts(), options={"collate": pad}))
    run = next(
        run
        for run in custom_runs(replace(proof_of_texts.config, steps=4), float64=True)
        if run.resume_layout is not None
    )
    task = prepare_custom(run, proof_of_texts.subject, ModelFacts(""), Path()).task
    _, batch = validate(run.resume_layout, own_model=True)
    resumed = task.on_layout(run.resume_layout, batch)
    assert (task.replicas, task.accumulation) != (batch.replicas, batch.accumulation)
    assert (resumed.replicas, resumed.accumulation) == (batch.replicas, batch.accumulation)


def test_running_statistics_are_followed_through_a_resume_on_another_layout():
    case = CustomCase(Classifier(nn.SyncBatchNorm(WIDTH)), class_loss, LayoutConfig(replicate=2), Points())
    of_case = CustomProof(replace(case.config(), steps=4, precision=PrecisionConfig(compute="fp64")), case.subject())
    claims = list(check_custom_training(of_case.config, of_case.subject, of_case.facts))
    assert [claim.measured for claim in claims if not claim.passed] == []
    assert [claim.claim.split(":")[0] for claim in claims] == ["as configured", "variation", "another layout"]


def test_plain_objective_passes_dicts_by_keyword_and_counts_unpadded_labels():
    model = TokenModel().double()
    objective = PlainObjective(model, text_loss, pad)
    samples = [{"labels": [1, 2, 3], "tokens": [0, 1, 2]}, {"tokens": [4, 5], "labels": [5, 6]}]
    batch = objective.batch([{n: torch.tensor(v).numpy() for n, v in s.items()} for s in samples])
    by_hand = sum(token_loss(model(torch.tensor([s["tokens"]])), torch.tensor([s["labels"]])) for s in samples)
    assert torch.allclose(objective.total(batch, torch.float64), by_hand)
    assert objective.count(batch) == 5


def test_pipeline_returns_the_trained_weights_of_every_stage(tmp_path):
    case = CustomCase(TokenModel(), token_loss, LayoutConfig(replicate=1, pipeline=2))
    before = {name: value.clone() for name, value in case.module.state_dict().items()}
    train(case.config(), model=case.module, loss=token_loss, source=case.source, run=tmp_path / "run", quiet=True)
    assert not [name for name, value in case.module.state_dict().items() if torch.equal(value, before[name])]


@pytest.mark.long
@pytest.mark.parametrize("layout", [LayoutConfig(replicate=2, shard="parameters"), LayoutConfig(replicate=2)])
def test_whole_certificate_of_a_custom_model_holds(layout):
    case = CustomCase(TokenModel(tie=True), token_loss, layout)
    certificate = certify(case.config(), custom=case.subject().custom, sources=case.subject().sources)
    assert certificate["passed"], [check for check in certificate["checks"] if not check["passed"]]
    assert {check["check"] for check in certificate["checks"]} >= {"stream", "model", "training", "recovery"}


@pytest.mark.long
def test_axis_of_a_fault_is_named_in_a_hybrid_layout(tmp_path):
    case = replace(
        CUSTOM_FAULTS["scale inside of the sharded region"].build(), layout=LayoutConfig(replicate=2, tensor=2)
    )
    of_case = proof(case)
    run = next(run for run in custom_runs(case.config(), float64=True) if run.name == "float64")
    text = explain_axes(case.config(), run, of_case.subject, of_case.facts, tmp_path)
    assert text == "axis: tensor alone differs, replicate alone is right"
