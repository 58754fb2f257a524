"""The command line: what it prints, what it writes, and one line for every error."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import zbfx
from zbfx.cli import build_parser, main

ROOT = Path(__file__).parent.parent
FILE = str(ROOT / "tests/targets.py")
COMPILE = ["--stages", "4", "--ranks", "2", "--microbatches", "4"]


@pytest.fixture
def said(capsys):
    """Run the command line: (exit code, stdout, stderr)."""

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(argv)
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump") / "plan"
    assert main(["dump", f"{FILE}:target", *COMPILE, "--out", str(folder)]) == 0
    return folder


def test_help_shows_an_example_of_every_verb(said):
    code, out, _ = said("--help")
    actions = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    verbs = list(actions[0].choices)
    assert code == 0 and {"dump", "run"} <= set(verbs)
    for verb in verbs:
        assert f"  zbfx {verb} " in out
        assert f"zbfx {verb} " in said(verb, "--help")[1].split("example", 1)[1]


def test_dump_prints_stages_grid_and_programs(said):
    code, out, err = said("dump", f"{FILE}:target", *COMPILE)
    assert (code, err) == (0, "")
    assert "4 stages on 2 ranks, zb-h1, 4 microbatches" in out
    assert out.count("\nrank 0 F0") == 1 and out.count("\nrank 1 ·") >= 1  # one in each band of a narrow grid
    assert out.count("def step(rank):") == 2 and "...  # " in out
    assert "\x1b[" not in out  # no colours where no terminal is


def test_what_program_is_the_rank_file(said, plan_folder):
    _, out, _ = said("dump", f"{FILE}:target", *COMPILE, "--what", "program", "--rank", "1")
    assert out == (plan_folder / "rank_1.py").read_text()


def test_what_graphs_shows_shapes_and_source_lines(said):
    _, out, _ = said("dump", f"{FILE}:target", *COMPILE, "--what", "graphs", "--rank", "0")
    assert "# stage 0, B: empty: no input of this stage needs a gradient" in out
    assert "# stage 1, B: " in out and "# stage 2" not in out
    assert "tanh: f32[2, 16] = tanh.default(" in out


def test_json_is_figures_and_the_schedule(said):
    _, out, _ = said("dump", f"{FILE}:target", *COMPILE, "--schedule", "1f1b", "--memory", "1MiB", "--json")
    found = json.loads(out)
    assert [s["parameters"] for s in found["stages"]] == [272] * 4
    assert [s["sends"] for s in found["stages"]] == [2 * 16 * 4] * 3 + [0]
    assert [r["limit"] for r in found["ranks"]] == [2**20] * 2
    assert found["schedule"]["method"] == "1f1b" and found["schedule"]["placement"] == [0, 0, 1, 1]


def test_a_schedule_can_come_from_a_file(said, plan_folder):
    edited = json.loads((plan_folder / "schedule.json").read_text())
    edited["method"] = "mine"
    (plan_folder / "mine.json").write_text(json.dumps(edited))
    for name, method in (("mine.json", "mine"), ("schedule.csv", "custom")):
        _, out, _ = said("dump", f"{FILE}:target", "--ranks", "2", "--schedule", str(plan_folder / name), "--json")
        found = json.loads(out)["schedule"]
        assert found["method"] == method and found["ranks"] == edited["ranks"]


def test_a_searched_schedule_says_how_good_it_is_and_why(said):
    search = ["--schedule", "auto", "--placement", "auto", "--objective", "span", "--w-parts", "2", "--seconds", "0.2"]
    code, out, err = said("dump", f"{FILE}:target", *COMPILE, *search)
    assert (code, err) == (0, "")
    assert re.search(r"searched in .* s: span .*, no schedule for this placement is below .*within [\d.]+% of the optimum", out)
    assert "\nplacement " in out and "linear" in out and "interleaved" in out
    assert "stage_1.GRADIENTS[1])" in out
    assert "# stage 1, W_1: p" in said("dump", f"{FILE}:target", *COMPILE, *search, "--what", "graphs")[1]
    found = json.loads(said("dump", f"{FILE}:target", *COMPILE, *search, "--json")[1])
    assert found["search"]["objective"] == "span" and found["search"]["why"].startswith("placement ")
    assert found["schedule"]["w_parts"] == 2 and 0 <= found["search"]["gap"] < 1


@pytest.mark.parametrize("mode", ["synchronous", "post-validation", "2bw"])
def test_dump_shows_weights_in_time(said, golden, mode, monkeypatch):
    """What is resident, steps one after another with updates and validations, the period, the programs' parts."""
    monkeypatch.setenv("COLUMNS", "100")
    options = [*COMPILE, "--weights", mode, "--max-norm", "1.0", "--schedule", "zb-h1"]
    code, out, err = said("dump", f"{FILE}:target", *options, "--what", "schedule")
    assert (code, err) == (0, "")
    golden("\n".join(line.rstrip() for line in out.splitlines()))
    found = json.loads(said("dump", f"{FILE}:target", *options, "--json")[1])
    assert found["weights"]["mode"] == mode and found["weights"]["period"] > 0
    assert [sum(r.values()) for r in found["weights"]["resident"]] == [r["static"] for r in found["ranks"]]


def test_run_steps_the_optimizer_in_the_programs(tmp_path, capfd):
    """What the plan was compiled with is noted in its folder; a stream's first loss comes with the second step."""
    options = [*COMPILE, "--weights", "2bw", "--max-norm", "1.0", "--correction", "predict"]
    assert main(["dump", f"{FILE}:target", *options, "--out", str(tmp_path / "plan")]) == 0
    recorded = json.loads((tmp_path / "plan/plan.json").read_text())["run_with"]
    assert recorded == {"max_norm": 1.0, "correction": "predict"}
    assert main(["run", str(tmp_path / "plan"), "--steps", "4"]) == 0
    out = capfd.readouterr().out
    assert "step 1/4  loss comes with the next step" in out and "nan" not in out
    first, last = re.search(r"^loss ([\d.]+) -> ([\d.]+)", out, re.MULTILINE).groups()
    assert float(last) < float(first)


def test_a_placement_can_be_written_out(said):
    found = json.loads(said("dump", f"{FILE}:target", *COMPILE, "--placement", "1,1,0,0", "--json")[1])
    assert found["schedule"]["placement"] == [1, 1, 0, 0]


def test_a_model_on_the_meta_device_is_dumped_without_values(said):
    code, out, err = said("dump", f"{FILE}:on_meta", "--stages", "2", "--microbatches", "2", "--json")
    assert (code, err) == (0, "")
    assert sum(s["parameters"] for s in json.loads(out)["stages"]) == 4 * (4096 * 4096 + 4096)


def test_the_folder_names_its_target_and_loads(plan_folder):
    spec = json.loads((plan_folder / "plan.json").read_text())["target"]
    assert spec.endswith("tests/targets.py:target") and not os.path.isabs(spec)
    target = zbfx.target.load_target(f"{FILE}:target")
    pipe = zbfx.load(plan_folder, target.model, loss=target.loss)
    assert pipe.step(*target.example_inputs, target=target.example_target) > 0


def test_run_trains_a_plan_folder_on_processes_and_an_edit_runs(plan_folder, tmp_path, capfd):
    program = plan_folder / "rank_1.py"
    whole = program.read_text()
    program.write_text(whole.replace("def step(rank):\n", "def step(rank):\n    print('edited by hand', flush=True)\n"))
    try:
        assert main(["run", str(plan_folder), "--steps", "3", "--trace", str(tmp_path / "trace.json")]) == 0
    finally:
        program.write_text(whole)
    out = capfd.readouterr().out
    losses = [float(line.split("loss ")[1].split()[0]) for line in out.splitlines() if line.startswith("step ")]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert "samples/s; bubble measured" in out
    assert out.count("edited by hand") == 3
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    actions = Counter(e["name"] for e in events if e["ph"] == "X")
    planned = json.loads((plan_folder / "schedule.json").read_text())["ranks"]
    assert actions == Counter(a for rank in planned for a in rank if not a.startswith("0B"))  # nobody wants the input's gradient


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "required: VERB"),
        (["dump"], "required: TARGET"),
        (["dump", "x.py:f", "--stages", "none"], "'none' is not a whole number"),
        (["dump", "x.py:f"], "no such file: x.py"),
        (["dump", f"{FILE}:target", "--microbatches", "3"], "a batch of 8 does not divide into microbatches=3"),
        (["dump", f"{FILE}:target", "--schedule", "best"], "'best'"),
        (["dump", f"{FILE}:target", "--schedule", "missing.json"], "--schedule missing.json: cannot be read"),
        (["dump", f"{FILE}:target", "--memory", "many"], "'many' is no size"),
        (["dump", f"{FILE}:target", *COMPILE, "--memory", "5KiB"], "rank 0"),
        (["dump", f"{FILE}:target", *COMPILE, "--rank", "2"], "--rank 2: the plan has ranks 0 to 1"),
        (["dump", f"{FILE}:target", "--stages", "400", "--microbatches", "1"], "400"),
        (["dump", f"{FILE}:target", "--stages", "2", "--ranks", "4"], "ranks=4"),
        (["dump", f"{FILE}:target", "--placement", "0,one"], "--placement 0,one: write the rank of each stage as 0,1,1,0"),
        (["dump", f"{FILE}:target", "--w-parts", "2"], "w_parts=2, but schedule zb-h1 takes each W as it is"),
        (["dump", f"{FILE}:target", "--device", "tpu"], "tpu"),
        (["dump", f"{FILE}:target", "--max-norm", "1"], "--max-norm goes with --weights: synchronous, post-validation, 2bw"),
        (["dump", f"{FILE}:target", "--weights", "2bw", "--loss-scale", "large"], "'large' is neither a number nor dynamic"),
        (["dump", f"{FILE}:target", "--weights", "2bw", "--schedule", "gpipe"], "2bw needs an order that repeats itself"),
        (["dump", f"{FILE}:no_inputs"], "no example inputs"),
        (["run", "nothing"], "'nothing' is neither a plan folder nor a target"),
        (["run", f"{FILE}:pair", "--target", "x.py:f"], "--target goes with a plan folder"),
        (["run", f"{FILE}:pair", "--device", "cuda"], "torchrun --nproc-per-node 4"),
        (["run", str(ROOT / "tests")], "plan.json: no such file"),
    ],
)
def test_an_error_is_one_line_and_code_2(said, argv, message):
    code, out, err = said(*argv)
    assert code == 2 and out == ""
    assert err.startswith("zbfx") and err.count("\n") == 1 and message in err


def test_what_a_plan_folder_fixes_cannot_be_given(said, plan_folder):
    assert "--schedule has no effect" in said("run", str(plan_folder), "--schedule", "gpipe")[2]
    assert "a plan for 2 ranks" in said("run", str(plan_folder), "--ranks", "4")[2]


@pytest.mark.parametrize("argv", [["--traceback", "dump", "x.py:f"], ["dump", "x.py:f", "--traceback"]])
def test_traceback_shows_the_rest(argv):
    with pytest.raises(zbfx.InputError, match="no such file"):
        main(argv)


def test_under_torchrun_each_process_runs_its_rank():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "zbfx.cli", "run", f"{FILE}:target"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--stages", "4", "--steps", "2"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "4 stages on 2 ranks" in done.stdout and done.stdout.count("step 2/2") == 1


def test_a_reader_that_leaves_ends_it_quietly():
    command = f"{sys.executable} -m zbfx.cli dump {FILE}:target --stages 2 --what program | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.stdout.startswith('"""Rank 0 of 2')
