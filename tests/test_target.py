"""Targets: how they are named, and what is said when one is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zbfx import InputError
from zbfx.target import Target, load_target

FILE = str(Path(__file__).parent / "targets.py")


@pytest.mark.parametrize("where", [FILE, "tests.targets"])
def test_a_file_and_a_module_name_the_same(where):
    found = load_target(f"{where}:pair")
    assert isinstance(found, Target) and found.model(*found.example_inputs).dim() == 0


def test_a_target_comes_back_as_it_is():
    found = load_target(f"{FILE}:target")
    assert found.loss is not None and found.example_target.shape == (8, 16)


def test_without_batches_every_step_is_the_example():
    found = Target(torch.nn.Linear(1, 1), (1,), {"a": 2}, 3)
    steps = found.steps()
    assert [next(steps) for _ in range(2)] == [((1,), {"a": 2}, 3)] * 2


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_a_target.py").write_text("import torch\nmodel = torch.nn.Linear(2, 2)\n")
    (tmp_path / "user.py").write_text(
        "import torch\nfrom neighbour_of_a_target import model\n\ndef made():\n    return model, {'input': torch.ones(2, 2)}\n"
    )
    assert list(load_target(f"{tmp_path}/user.py:made").example_kwargs) == ["input"]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("gpt2", "'gpt2' is no target: write file.py:function"),
        (":f", "is no target"),
        ("nowhere/x.py:f", "no such file: nowhere/x.py"),
        ("no_such_module_at_all:f", "no module 'no_such_module_at_all'"),
        ("tests.targets.deeper:f", "importing tests.targets.deeper|no module 'tests.targets.deeper'"),
        ("tests.targets:missing", "defines no function 'missing'; it defines mlp, "),
        ("tests.targets:not_a_function", "defines no function 'not_a_function'"),
        ("tests.targets:raises", r"the function raised RuntimeError: no data here \(targets.py:\d+\)"),
        ("tests.targets:wrong_result", "returned Sequential; return .model, example_inputs."),
        ("tests.targets:wrong_model", "the model it returned is a str"),
    ],
)
def test_what_is_wrong_is_named(spec, message):
    with pytest.raises(InputError, match=message):
        load_target(spec)


@pytest.mark.parametrize(
    "text, message",
    [
        ("import torch\nx = 1 +\n", r"SyntaxError: .* \(broken.py:2\)"),
        ("\nx = 1 / 0\n", r"ZeroDivisionError: .* \(broken.py:2\)"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, text, message):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(InputError, match=message):
        load_target(f"{tmp_path}/broken.py:f")
