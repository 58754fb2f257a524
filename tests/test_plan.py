"""Plan folders: written, read and run again; a hand edit runs; damage is refused; nothing in them is unpickled."""

from __future__ import annotations

import json
import pickletools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbfx
from tests.models import MODELS, Case
from tests.reference import Reference, differences


def small_case() -> Case:
    return MODELS["mlp"](layers=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = small_case()
    args, _, target = case.batch(6)
    pipe = zbfx.compile(case.fresh(), 3, ranks=2, example_inputs=args, example_target=target, loss=case.loss, microbatches=3)
    return pipe.plan.save(tmp_path_factory.mktemp("plans") / "plan")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "plan"))


def step_of(folder: Path, **options: Any) -> tuple[nn.Module, torch.Tensor, zbfx.Pipeline]:
    case = small_case()
    model = case.fresh()
    pipe = zbfx.load(folder, model, **options)
    args, _, target = case.batch(6)
    return model, pipe.step(*args, target=target), pipe


# ---------------------------------------------------------------- there and back


def test_a_loaded_plan_computes_the_same_bits(saved: Path) -> None:
    model, loss, pipe = step_of(saved)
    assert differences(model, loss, Reference(small_case(), 2).step(3)) == []
    assert pipe.plan.microbatches == 3 and len(pipe.plan.programs) == 2


def test_a_loaded_plan_says_what_the_saved_one_said(saved: Path) -> None:
    case = small_case()
    args, _, target = case.batch(6)
    wanted = zbfx.compile(
        case.fresh(), 3, ranks=2, example_inputs=args, example_target=target, loss=case.loss, microbatches=3
    ).plan
    got = zbfx.load(saved, case.fresh()).plan
    assert got.schedule == wanted.schedule and got.schedule.name == wanted.schedule.name
    assert got.costs == wanted.costs and got.timeline == wanted.timeline
    assert [p.source for p in got.programs] == [p.source for p in wanted.programs]
    assert [p.peak for p in got.programs] == [p.peak for p in wanted.programs]
    assert got.owners == wanted.owners and got.static_bytes == wanted.static_bytes
    assert str(got) == str(wanted)


def test_saving_what_was_loaded_writes_the_same_files(saved: Path, tmp_path: Path) -> None:
    zbfx.load(saved, small_case().fresh()).plan.save(tmp_path / "again")
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()}


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_models_with_buffers_keywords_and_constants(name: str, tmp_path: Path) -> None:
    case = MODELS["gpt2"](layers=1) if name == "gpt2" else MODELS[name]()
    args, kwargs, target = case.batch(4)
    pipe = zbfx.compile(
        case.fresh(), 2, example_inputs=args, example_kwargs=kwargs, example_target=target, loss=case.loss, microbatches=2
    )
    pipe.plan.save(tmp_path)
    model = case.fresh()
    loss = zbfx.load(tmp_path, model).step(*args, target=target, **kwargs)
    assert differences(model, loss, Reference(case, 2).step(2)) == []


def test_constants_travel_as_safetensors(tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.table = nn.Linear(4, 4), torch.arange(4.0)  # a plain attribute: neither parameter nor buffer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a(x) * self.table).square().mean()

    torch.manual_seed(0)
    model, x = Table(), torch.randn(4, 4)
    wanted = zbfx.compile(model, 1, microbatches=2, example_inputs=(x,))
    loss = wanted.step(x)
    wanted.plan.save(tmp_path)
    assert (tmp_path / "constants.safetensors").is_file()
    assert torch.equal(zbfx.load(tmp_path, model).step(x), loss)


def test_the_folder_is_text_that_people_can_read(saved: Path) -> None:
    names = sorted(p.name for p in saved.iterdir())
    assert names == ["plan.json", "rank_0.py", "rank_1.py", "schedule.csv", "schedule.json"]
    for path in saved.iterdir():
        assert path.read_bytes().isascii() and path.stat().st_size > 100
        with pytest.raises(ValueError):
            list(pickletools.genops(path.read_bytes()))  # not a pickle
    manifest = json.loads((saved / "plan.json").read_text())
    assert manifest["ranks"] == 2 and manifest["microbatches"] == 3
    assert manifest["stages"][0]["parameters"][0] == "0.weight"
    source = (saved / "rank_1.py").read_text()
    assert source.startswith('"""Rank 1 of 2: stage 2. zb-h1, 3 microbatches') and "def step(rank):" in source


def test_saving_again_leaves_no_old_rank_behind(folder: Path) -> None:
    case = small_case()
    args, _, target = case.batch(6)
    zbfx.compile(case.fresh(), 1, example_inputs=args, example_target=target, loss=case.loss, microbatches=3).plan.save(folder)
    assert sorted(p.name for p in folder.glob("rank_*")) == ["rank_0.py"]
    assert len(zbfx.load(folder, case.fresh()).plan.programs) == 1


# ---------------------------------------------------------------- the file is what runs


def test_a_hand_edit_runs(folder: Path) -> None:
    """The gradient that stage 2 hands to its optimizer is doubled by one line in the file."""
    file = folder / "rank_1.py"
    file.write_text(_doubled(file.read_text()))
    model, loss, _ = step_of(folder)
    wanted = Reference(small_case(), 2).step(3)
    names = [n for n, s in zbfx.load(folder, small_case().fresh()).plan.owners.items() if s == 2]
    assert torch.equal(loss, wanted.loss) and names
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, (2 if name in names else 1) * wanted.grads[name]), name


def _doubled(text: str) -> str:
    lines = []
    for line in text.splitlines():
        call, found, rest = line.partition("rank.accumulate(2, ")
        if found:
            value, _, end = rest.partition("; del")
            line = f"{call}{found}[2 * g for g in {value[:-1]}]); del{end}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def test_a_hand_edit_that_fails_names_rank_action_and_file(folder: Path) -> None:
    file = folder / "rank_0.py"
    text = file.read_text()
    assert text.count('rank.begin("0F1")') == 1
    file.write_text(text.replace('rank.begin("0F1")', 'rank.begin("0F1"); raise ValueError("my edit")'))
    with pytest.raises(zbfx.RankError, match="rank 0 failed at 0F1: ValueError: my edit") as e:
        step_of(folder)
    frames = []
    trace = e.value.__cause__.__traceback__ if e.value.__cause__ else None
    while trace:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    assert str(file) in frames


def test_a_hand_edit_that_sends_nothing_ends_in_an_error_not_in_waiting(folder: Path) -> None:
    file = folder / "rank_0.py"
    text = file.read_text()
    sends = [line for line in text.splitlines() if 'rank.send("2F1"' in line]
    assert len(sends) == 1
    file.write_text(text.replace(sends[0], sends[0].partition("rank.send")[0] + "pass"))
    with pytest.raises(zbfx.RankError, match="2F1"):
        step_of(folder)


def test_other_shapes_are_compiled_for_after_loading(saved: Path) -> None:
    case = small_case()
    model, loss, pipe = step_of(saved, loss=case.loss)
    owners = pipe.plan.owners
    model.zero_grad()
    args, _, target = case.batch(9)
    loss = pipe.step(*args, target=target)
    assert differences(model, loss, Reference(case, 3).step(3)) == []
    assert pipe.plan.owners == owners


# ---------------------------------------------------------------- damage

DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda f: shutil.rmtree(f), r"plan.json: no such file. A plan folder is what"),
    "no manifest": (lambda f: (f / "plan.json").unlink(), "plan.json: no such file"),
    "no rank file": (lambda f: (f / "rank_1.py").unlink(), "rank_1.py: no such file"),
    "no schedule": (lambda f: (f / "schedule.json").unlink(), "schedule.json: no such file"),
    "not JSON": (lambda f: (f / "plan.json").write_text("{\n oops"), r"plan.json:2: not JSON"),
    "a list": (lambda f: (f / "plan.json").write_text("[]"), "plan.json: not a JSON object"),
    "bytes": (lambda f: (f / "plan.json").write_bytes(b"\xff\xfe\x00"), "plan.json: cannot be read"),
    "other format": (lambda f: edit(f, format="zbfx-plan/9"), "format 'zbfx-plan/9', this zbfx reads 'zbfx-plan/1'"),
    "ranks": (lambda f: edit(f, ranks="two"), "ranks='two' is no number of ranks"),
    "stages": (lambda f: edit(f, stages=None), "'stages' is missing or not"),
    "a stage": (lambda f: edit(f, stages=[{}]), "stage 0: 'parameters' is missing"),
    "fewer ranks": (lambda f: edit(f, ranks=1), "1 ranks, but the schedule has 2"),
    "syntax": (lambda f: (f / "rank_0.py").write_text("def step(rank:"), "rank_0.py does not run: SyntaxError"),
    "no step": (lambda f: (f / "rank_0.py").write_text("MESSAGES = {}"), r"rank_0.py defines no step"),
    "schedule": (lambda f: (f / "schedule.json").write_text("{}"), "placement|costs"),
}


def edit(folder: Path, **fields: Any) -> None:
    file = folder / "plan.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_refused(name: str, folder: Path) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises((zbfx.PlanError, zbfx.ScheduleError), match=message):
        step_of(folder)


def test_a_plan_for_another_model_is_refused(saved: Path) -> None:
    case = small_case()
    args, _, target = case.batch(6)
    with pytest.raises(zbfx.ZbfxError, match=r"has no parameter or buffer .*: is the plan for another model"):
        zbfx.load(saved, nn.ModuleDict({"head": nn.Linear(16, 4)})).step(*args, target=target)


def test_an_input_that_is_no_json_cannot_be_saved(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, most: float) -> torch.Tensor:
            return self.a(x).clamp(max=most).square().mean()

    pipe = zbfx.compile(Takes(), 1, microbatches=1, example_inputs=(torch.randn(2, 4), float("inf")))
    with pytest.raises(zbfx.PlanError, match="this plan cannot be written: an input is no JSON value"):
        pipe.plan.save(tmp_path)


def test_a_model_of_other_shapes_is_refused(tmp_path: Path) -> None:
    def mlp(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))

    x = torch.randn(4, 4)
    options = {"example_inputs": (x,), "example_target": x, "loss": torch.nn.functional.mse_loss, "microbatches": 2}
    zbfx.compile(mlp(8), 2, **options).plan.save(tmp_path / "plan")
    again = zbfx.load(tmp_path / "plan", mlp(8)).plan
    again.save(tmp_path / "copy")  # a plan that was read saves the shapes it was given
    for folder in ("plan", "copy"):
        with pytest.raises(zbfx.PlanError, match=r"'0.weight' of shape \[8, 4\], this model has \[6, 4\]"):
            zbfx.load(tmp_path / folder, mlp(6))


def test_timeouts_are_checked() -> None:
    with pytest.raises(zbfx.InputError, match="dead_after=10"):
        zbfx.compile(torch.nn.Linear(2, 2), 1, dead_after=10, timeout=5)
