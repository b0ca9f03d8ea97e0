"""Drills: cases are what their question says, good answers pass, and each fault of a bad answer is named."""

from __future__ import annotations

import subprocess
import sys

import pytest
from meshwright_practice.cards.deck import communication
from meshwright_practice.cards.registry import all_cards, collect_cards
from meshwright_practice.interview.drills.answer import parse_answer
from meshwright_practice.interview.drills.case_figures import communication_figures, draw_case, judge_case
from meshwright_practice.interview.drills.drill_grading import grade_answer, scores
from meshwright_practice.interview.drills.drill_text import drill_json, drill_text
from meshwright_practice.interview.drills.quantities import quantities
from meshwright_practice.interview.drills.scenarios import CHEAPER_SHARDING, PARTS, SCENARIOS, find_scenario
from meshwright_practice.interview.drills.vocabulary import STRATEGIES, asserted, asserted_names
from meshwright_practice.interview.follow_ups import cards_about

from meshwright.errors import ConfigError
from tests.practice.interview.drill_answers import BUZZWORDS, CASES, CHECKPOINTING


def all_cases():
    return [(scenario, case) for scenario in SCENARIOS.values() for case in scenario.cases]


@pytest.mark.parametrize(("scenario", "case"), all_cases(), ids=lambda each: getattr(each, "name", None))
def test_case_is_what_its_question_says(scenario, case):
    """The limit is the planner's bottleneck, one remedy removes it, and another one does not, where there is a trap."""
    judged = judge_case(scenario, case)
    expected = "none" if scenario.limit == "batch" else scenario.limit
    assert judged.bottleneck.kind == expected
    assert judged.best.helps
    if scenario.name != "barely_exceeds":
        assert any(not each.helps for each in judged.remedies)
    memory, device = judged.now.peak_memory.total, judged.now.job.cluster.device.memory
    if scenario.name == "barely_exceeds":
        assert 1 < memory / device < 1.2
    if scenario.name == "substantially_exceeds":
        state = judged.now.peak_memory
        assert state.parameters + state.gradients + state.optimizer > device


@pytest.mark.parametrize(("name", "index", "answer", "expected"), CASES)
def test_answer_is_graded_as_it_deserves(name, index, answer, expected):
    scenario = SCENARIOS[name]
    case = judge_case(scenario, scenario.cases[index])
    checks = grade_answer(case, answer)
    assert {check.name for check in checks if not check.passed} == expected
    for check in checks:
        assert check.passed or check.message


@pytest.mark.parametrize(("scenario", "case"), all_cases(), ids=lambda each: getattr(each, "name", None))
def test_figures_of_a_collective_have_all_its_messages(scenario, case):
    """Against the planner's own sum of every remedy: messages of one collective have several sizes."""
    for judged in judge_case(scenario, case).remedies:
        figures = [(figure.name, figure.value) for figure in communication_figures(judged.estimate)]
        calls = [call for call in judged.estimate.calls if call.ranks > 1]
        for name in {f"{call.axis} {call.collective}" for call in calls}:
            total = sum(c.message_bytes * c.calls for c in calls if f"{c.axis} {c.collective}" == name)
            [stated] = [value for each, value in figures if each == f"all {name} of a step"]
            assert stated == pytest.approx(total, rel=1e-12)


def test_all_reduce_of_a_step_is_that_of_all_gradients():
    """Sixteen blocks are 3.63 GiB of float32; the embedding and the head are the rest."""
    scenario = SCENARIOS["all_reduce_dominates"]
    case = judge_case(scenario, scenario.cases[0])
    figures = {figure.name: figure.value for figure in communication_figures(case.now)}
    assert figures["all replicate all_reduce of a step"] == 4 * case.now.job.model.parameters


def test_words_without_numbers_cannot_score_full():
    scenario = SCENARIOS["barely_exceeds"]
    table = scores(grade_answer(judge_case(scenario, scenario.cases[0]), BUZZWORDS))
    assert max(table["problem"], table["communication"], table["tradeoff"]) <= 0.5


def test_planner_answers_after_the_user():
    scenario = SCENARIOS["barely_exceeds"]
    case = judge_case(scenario, scenario.cases[0])
    checks = grade_answer(case, CHECKPOINTING)
    text = drill_text(case, checks)
    assert text.index("measurement: 100%") < text.index("The planner's answer")
    value = drill_json(case, 0, checks)
    assert value["status"] == "pass"
    assert all(value["planner"][part] for part in PARTS)


def test_seed_draws_the_same_case_and_others_draw_others():
    scenario = SCENARIOS["all_reduce_dominates"]
    assert draw_case(scenario, 3).case == draw_case(scenario, 3).case
    assert (
        len({draw_case(scenario, seed).case.cluster + str(draw_case(scenario, seed).case.model) for seed in range(8)})
        > 1
    )


@pytest.mark.parametrize(
    ("text", "is_asserted"),
    [
        ("We use FSDP.", True),
        ("We do not use FSDP.", False),
        ("I would use DDP instead of FSDP.", False),
        ("FSDP does not help.", False),
        ("Not a larger batch; FSDP is the change.", True),
        ("It needs 1.5 GiB without FSDP.", False),
        ("Never mind the batch, but FSDP helps.", True),
    ],
)
def test_denied_words_do_not_count(text, is_asserted):
    assert asserted(r"\bFSDP\b", text) is is_asserted


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("FSDP needs less memory at the price of more bytes.", False),
        ("FSDP uses less memory and moves more bytes.", False),
        ("ZeRO-2 sends fewer bytes than FSDP.", False),
        ("Compared to FSDP, DDP sends fewer bytes.", False),
        ("Sharding halves memory, and half of the bytes that it adds are hidden.", False),
        ("FSDP moves less bytes than DDP.", True),
        ("FSDP, compared with DDP, sends fewer bytes.", True),
        ("ZeRO moves only half of the bytes that DDP communicates.", True),
        ("Sharding the state causes less network traffic.", True),
    ],
)
def test_only_wrong_statements_about_the_bytes_of_sharding_are_marked(text, is_wrong):
    assert asserted(CHEAPER_SHARDING[0], text) is is_wrong


@pytest.mark.parametrize(
    ("text", "strategies"),
    [
        ("Tensor parallelism with sequence parallelism.", ["tensor"]),
        ("Context parallelism as ring attention.", ["context"]),
        ("Reduce in bf16.", ["bf16_reduction"]),
        ("A bfloat16 all-reduce of the gradients.", ["bf16_reduction"]),
        ("The hook bf16_compress_hook.", ["bf16_reduction"]),
        ("Parameters in bf16 and gradients in float32.", []),
    ],
)
def test_strategies_are_read_from_the_words_of_the_field(text, strategies):
    assert asserted_names(STRATEGIES, text) == strategies


def test_planner_does_not_compare_steps_of_different_batches():
    scenario = SCENARIOS["all_reduce_dominates"]
    case = judge_case(scenario, scenario.cases[1])
    assert case.best.remedy.batch
    assert sum(each.helps for each in case.remedies) > 1
    assert not [sentence for sentence in case.explanation().tradeoff if sentence.startswith("Rejected")]


def test_suggested_cards_are_those_of_the_registry():
    item = next(card for card in all_cards().values() if card.items).items[0]
    assert cards_about([item]) == [card.id for card in all_cards().values() if item in card.items]
    nested = next(card for card in collect_cards(communication).values() if card.items)
    assert nested.id in cards_about(nested.items)


def test_numbers_need_units():
    assert [(each.value, each.dimension) for each in quantities("4.6 GiB, 1,024 bytes, 72%, 16x, 500 ms, 8 ranks")] == [
        (4.6 * 2**30, "bytes"),
        (1024, "bytes"),
        (0.72, "share"),
        (16, "ratio"),
        (0.5, "seconds"),
    ]


def test_answer_is_read_by_its_headings():
    parts = parse_answer("# Problem\nA\n## mechanism:\nB\nCommunication: C\n**Tradeoff**\nD\nMeasurement: E")
    assert parts == dict(zip(PARTS, "ABCDE", strict=True))
    with pytest.raises(ConfigError, match="none of the five parts"):
        parse_answer("FSDP")


def test_unknown_drill_is_refused_with_the_names():
    with pytest.raises(ConfigError, match="barely_exceeds"):
        find_scenario("no")


def test_drills_do_not_import_torch():
    code = (
        "import sys; from meshwright.base.cli import main; main(['practice', 'interview', '--drill', 'enormous']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, stdin=subprocess.DEVNULL)
