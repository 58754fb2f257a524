"""What every test gets: one CPU thread, no network, golden texts, and GPU tests skipped with a reason where CUDA is absent."""

from __future__ import annotations

import os

# Before torch or transformers is imported: they read these once. Ranks of a test run as threads or processes of their own.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import difflib
import re
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

TESTS = Path(__file__).parent
# A shared machine makes single examples slow by chance; pytest-timeout catches what hangs. Fixed examples keep CI repeatable.
hypothesis.settings.register_profile("zbfx", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("zbfx"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "zbfx")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write what the tests print to tests/golden instead of comparing"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    reason = f"needs a GPU: torch {torch.__version__} sees no CUDA device here"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """golden(text, name="") fails with a diff unless text equals tests/golden/<test file>/<test>[-name].txt."""
    update = request.config.getoption("--update-golden")
    folder = TESTS / "golden" / request.path.relative_to(TESTS).with_suffix("")

    def check(text: str, name: str = "") -> None:
        stem = "-".join(filter(None, (request.node.name, name)))
        file = folder / (re.sub(r"[^\w.-]+", "_", stem).strip("_") + ".txt")
        text = text.rstrip("\n") + "\n"
        if update:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        elif not file.exists():
            pytest.fail(
                f"no golden text {file.relative_to(TESTS.parent)}: make test ARGS=--update-golden writes it", pytrace=False
            )
        elif (wanted := file.read_text()) != text:
            diff = difflib.unified_diff(wanted.splitlines(), text.splitlines(), "golden", "now", lineterm="")
            way_out = "if the new text is right, make test ARGS=--update-golden writes it"
            pytest.fail("\n".join([f"differs from {file.relative_to(TESTS.parent)}; {way_out}", *diff]), pytrace=False)

    return check
