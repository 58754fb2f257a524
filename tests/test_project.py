"""The set-up itself: what the package asks for, what is pinned, and that the golden fixture can fail."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
pytest_plugins = ["pytester"]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return dict(re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines)


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for text in [*PROJECT["dependencies"], *(r for extra in extras for r in extra)]]


@pytest.mark.parametrize("requirement", sorted(set(map(str, requirements()))))
def test_every_requirement_is_pinned_to_a_version_it_allows(requirement):
    wanted = Requirement(requirement)
    assert wanted.name in pins(), f"add {wanted.name} to constraints.txt"
    assert wanted.specifier.contains(pins()[wanted.name])


def test_torch_is_pinned_but_the_package_allows_older_ones():
    (wanted,) = (r for r in requirements() if r.name == "torch")
    assert pins()["torch"] == "2.13.0"
    assert wanted.specifier.contains("2.11.0") and not wanted.specifier.contains("2.10.0")


def test_tests_run_on_one_thread():
    assert torch.get_num_threads() == 1


@pytest.fixture
def project(pytester):
    """A small project of its own with this one's conftest and one golden test that prints `text`."""

    def write(text: str) -> pytest.Pytester:
        pytester.mkdir("tests")
        (pytester.path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs CUDA\n")
        (pytester.path / "tests/conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
        (pytester.path / "tests/test_it.py").write_text(f"def test_print(golden):\n    golden({text!r})\n")
        return pytester

    return write


def test_a_missing_golden_text_fails_and_says_how_to_write_it(project):
    result = project("one").runpytest_inprocess("-p", "no:xdist", "tests")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no golden text tests/golden/test_it/test_print.txt*--update-golden*"])


def test_an_updated_golden_text_passes_and_a_changed_one_fails_with_a_diff(project):
    pytester = project("one\ntwo")
    pytester.runpytest_inprocess("-p", "no:xdist", "--update-golden", "tests").assert_outcomes(passed=1)
    file = pytester.path / "tests/golden/test_it/test_print.txt"
    assert file.read_text() == "one\ntwo\n"
    pytester.runpytest_inprocess("-p", "no:xdist", "tests").assert_outcomes(passed=1)
    file.write_text("one\n2\n")
    result = pytester.runpytest_inprocess("-p", "no:xdist", "tests")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*-2*", "*+two*"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so gpu tests are not skipped")
def test_gpu_tests_are_skipped_with_a_reason(project):
    pytester = project("one")
    (pytester.path / "tests/test_it.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test_never():\n    assert False\n")
    result = pytester.runpytest_inprocess("-p", "no:xdist", "-rs", "tests")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs a GPU*no CUDA device*"])
