"""The code of a custom model is part of the identity of its run: a resume with other code is refused, or recorded."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from meshwright import train
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.trainer.identity import NO_CODE_RECORD, check_run_folder, describe_code_changes
from meshwright.errors import ConfigError, IdentityError
from tests.kit.custom_model import Points, custom_config, summed_cross_entropy

CODE = {
    "class": "project.Net",
    "fingerprint": "1" * 16,
    "python": "3.11",
    "parts": {"function project.loss": "a" * 16},
    "structure": ["model: Net()"],
}
RECORD = {"identity": {"steps": 4}, "code": CODE}


def classifier(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3))


def doubled_cross_entropy(outputs, targets):
    return 2 * nn.functional.cross_entropy(outputs, targets, reduction="sum")


def test_finished_run_is_not_complete_for_another_activation_or_loss(tmp_path):
    def run(model, loss, steps=2, **options):
        return train(custom_config(steps), model=model, loss=loss, source=Points(), run=tmp_path, quiet=True, **options)

    first = run(classifier(), summed_cross_entropy)
    with pytest.raises(
        IdentityError, match=r"model.*: ReLU\(.*\) became model.*: GELU\(.*; try steps=3 or more with accept_code=True"
    ) as raised:
        run(classifier(nn.GELU), summed_cross_entropy, accept_code=True)
    assert "--" not in str(raised.value)
    with pytest.raises(
        IdentityError, match=r"loss was tests\.kit\.custom_model\.summed_cross_entropy and is .*doubled_cross_entropy"
    ):
        run(classifier(), doubled_cross_entropy)
    assert run(classifier(), summed_cross_entropy).parameters_digest == first.parameters_digest
    run(classifier(nn.GELU), summed_cross_entropy, steps=3, accept_code=True)
    [event] = [e for e in read_events(RunFolder(tmp_path).events(0)) if e["kind"] == "code_changed"]
    [change] = json.loads((tmp_path / "identity.json").read_text())["code_changes"]
    assert event["changes"] == change["changes"]
    assert (event["step"], change["step"]) == (2, 2)
    run(classifier(nn.GELU), summed_cross_entropy, steps=3)  # it is the code of the run now


def write_record(folder, **changes):
    (folder / "identity.json").write_text(json.dumps(RECORD | changes))
    return RunFolder(folder)


def test_changed_shape_is_named_and_neither_a_fork_nor_an_extension_is_offered(tmp_path):
    lines = [f"model.0: Linear(bias=True) weight[{width}, 4] float32 bias[{width}] float32" for width in (8, 16)]
    before, now = (
        {"identity": {"steps": 4, "model": line[-20:]}, "code": CODE | {"structure": ["model: Net()", line]}}
        for line in lines
    )
    folder = write_record(tmp_path, **before)
    for newest in (3, 4):
        with pytest.raises(
            IdentityError, match=r"parameters changed .*; model\.0\.weight was \[8, 4\] and is \[16, 4\]; try another"
        ) as raised:
            check_run_folder(folder, now, fork=0, attempt=2, newest=newest)
        assert "--fork" not in str(raised.value)
        assert "--accept-code" not in str(raised.value)


def test_changed_function_is_refused_by_name_and_accepted_on_request(tmp_path):
    folder = write_record(tmp_path)
    now = RECORD | {"code": CODE | {"parts": {"function project.loss": "b" * 16}}}
    with pytest.raises(
        IdentityError, match=r"code of the run changed: function project\.loss changed; try --accept-code"
    ):
        check_run_folder(folder, now, fork=0, attempt=2, newest=3)
    record = check_run_folder(folder, now, fork=0, attempt=2, newest=3, accept_code=True)
    assert record["code_changes"] == [{"attempt": 2, "step": 3, "changes": ["function project.loss changed"]}]
    assert check_run_folder(folder, now, fork=2, attempt=2, newest=3)["code_changes"] == record["code_changes"]
    assert check_run_folder(folder, RECORD, fork=0, attempt=2, newest=3)["code_changes"] == []
    for fork in (0, 2):
        with pytest.raises(
            IdentityError, match=r"complete with other code: function project\.loss changed; try --steps 5"
        ):
            check_run_folder(folder, now, fork=fork, attempt=2, newest=4, accept_code=True)


def test_run_folder_of_an_older_version_resumes_with_a_note(tmp_path):
    folder = write_record(tmp_path, code=None)
    record = check_run_folder(folder, RECORD, fork=0, attempt=2, newest=3)
    assert record["code_changes"][0]["changes"] == [NO_CODE_RECORD]


@pytest.mark.parametrize(
    "code", [3, [], {}, {"parts": {}}, {"parts": {"a": 1}, "structure": []}, {"parts": {}, "structure": [1]}]
)
def test_odd_code_record_is_one_line_with_exit_code_2(tmp_path, code):
    with pytest.raises(ConfigError, match="is not a valid identity record: code is not a record of code"):
        check_run_folder(write_record(tmp_path, code=code), RECORD, fork=0, attempt=2, newest=-1)


@pytest.mark.parametrize(
    "change", [3, {}, {"attempt": 1, "step": 2, "changes": [3]}, {"attempt": 1, "step": "2", "changes": []}]
)
def test_odd_change_of_code_is_one_line_with_exit_code_2(tmp_path, change):
    with pytest.raises(ConfigError, match="code_changes is not a list of changes of code"):
        check_run_folder(write_record(tmp_path, code_changes=[change]), RECORD, fork=0, attempt=2, newest=-1)


def test_other_version_of_python_is_accepted_on_request_only(tmp_path):
    folder, now = write_record(tmp_path), RECORD | {"code": CODE | {"python": "3.99"}}
    with pytest.raises(IdentityError, match=r"Python was 3\.11 and is 3\.99, so code cannot be compared; try --accept"):
        check_run_folder(folder, now, fork=0, attempt=2, newest=3)
    assert check_run_folder(folder, now, fork=0, attempt=2, newest=3, accept_code=True)["code_changes"]


def test_large_structure_of_a_stranger_is_compared_in_linear_time():
    class Line(str):
        compared = 0

        def __eq__(self, other):
            Line.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    before, now = (CODE | {"structure": [Line(f"{n}{kind}") for n in range(2000)]} for kind in "ab")
    assert len(describe_code_changes(before, now)) == 2000
    assert Line.compared < 10_000


def test_differences_of_a_strangers_record_are_cut(tmp_path):
    parts = {f"constant {'x' * 5000}{n}": "y" * 5000 for n in range(100)}
    folder = write_record(tmp_path, code=CODE | {"parts": parts})
    with pytest.raises(IdentityError) as raised:
        check_run_folder(folder, RECORD, fork=0, attempt=2, newest=-1)
    assert len(str(raised.value)) < 2000
