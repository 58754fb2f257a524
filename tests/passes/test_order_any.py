"""One door to all schedulers, and the answers kept on disk: found again, never trusted, never mixed up."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zbfx.errors import InputError, MemoryBudgetError
from zbfx.ir import Cost, CostModel
from zbfx.passes import order_any as door
from zbfx.passes import order_cache
from zbfx.passes.order_any import METHODS, order_any, share_limits
from zbfx.passes.order_search import order_auto
from zbfx.passes.placements import build_placement

COSTS = CostModel((Cost(1, 1, 0.5, 10, -6, -4),) * 8, ((0.0, 0.1, 0.1, 0.1),) * 4, (80,) * 4)
V = build_placement("v", 4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZBFX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def ask(costs: CostModel = COSTS, seed: int = 0) -> str:
    return order_any("auto", V, 6, costs, seconds=0.02, seed=seed).why


def test_found_again_and_only_for_the_same_question(folder: Path) -> None:
    first = order_any("auto", V, 6, COSTS, seconds=0.02)
    again = order_any("auto", V, 6, COSTS, seconds=0.02)
    assert again == first and again.why.endswith("(from the cache)")
    assert "cache" not in ask(seed=1) and "cache" not in ask(replace(COSTS, limit=(90,) * 4))
    assert len(list(folder.iterdir())) == 3


def test_answers_of_another_search_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key holds a hash of the schedulers' own files, so a changed search never answers with what the old one found."""
    assert "cache" not in ask() and "cache" in ask()
    monkeypatch.setattr(order_cache, "version", lambda: "another")
    assert "cache" not in ask() and "cache" in ask()


@pytest.mark.parametrize("damage", ["", "{", '{"format": "zbfx-schedule/2"}', "over"])
def test_damaged_answers_are_searched_again(folder: Path, damage: str) -> None:
    ask()
    (file,) = folder.iterdir()
    if damage == "over":  # a valid schedule, but one that breaks the limit
        loose = order_auto(V, 6, replace(COSTS, limit=(None,) * 4), seconds=0.02)
        fields = json.loads(file.read_text())
        fields["ranks"] = [[str(a) for a in rank] for rank in loose.schedule.ranks]
        assert max(loose.timeline.peak) > 80
        damage = json.dumps(fields)
    file.write_text(damage)
    assert "cache" not in ask() and "cache" in ask()


def test_off_and_unwritable_folders_only_cost_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.joinpath("cache").write_text("a file where the folder should be")
    assert "cache" not in ask() and "cache" not in ask()
    monkeypatch.setenv("ZBFX_CACHE", "off")
    assert "cache" not in ask() and "cache" not in ask()


def test_zb_1p_is_auto_with_its_limit() -> None:
    assert share_limits(V, COSTS, 1.5) == (120,) * 4
    wide = order_any("zb-2p", V, 6, replace(COSTS, limit=(None,) * 4), seconds=0.02)
    assert wide.costs.limit == (160,) * 4 and max(wide.timeline.peak) <= 160


def test_fixed_methods_respect_the_limit() -> None:
    assert order_any("zb-v", V, 6, COSTS).schedule.name == "zb-v"
    with pytest.raises(MemoryBudgetError, match="over its limit"):
        order_any("zb-v", V, 6, replace(COSTS, limit=(60,) * 4))


def test_placement_is_searched_where_none_is_given() -> None:
    assert order_any("auto", None, 6, COSTS, seconds=0.05).why.startswith("placement ")
    with pytest.raises(InputError, match="needs a placement"):
        order_any("1f1b", None, 6, COSTS)


def test_wrong_names() -> None:
    assert {"gpipe", "1f1b", "zb-v", "auto", "exact"} <= set(METHODS) and door.order_any is order_any
    with pytest.raises(InputError, match="no scheduling method; there are gpipe"):
        order_any("best", V, 6, COSTS)
    with pytest.raises(InputError, match="objective='speed'"):
        order_any("auto", V, 6, COSTS, objective="speed")
