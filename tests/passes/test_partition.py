"""Stages cut anywhere: together they compute what the whole graph computes; cuts never tear what belongs together."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import zbfx
from tests.models import Case
from tests.passes.graphs import LINK, TRACED, RandomNet, captured_of, cut, most_stages, random_nets
from tests.reference import Reference, differences
from zbfx.errors import InputError, PartitionError
from zbfx.ir import Captured, Forward, outputs_of
from zbfx.passes.partition import cuts_for_owners
from zbfx.passes.replicate import bases, replicated, written_storages
from zbfx.trace.replay import Replay


def values_of(captured: Captured, model: nn.Module, *leaves: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copies of all of the captured graph's placeholders."""
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    named = {n: state[user].detach().clone() for n, user in {**captured.params, **captured.buffers}.items()}
    return {**named, **captured.constants, **{n: leaves[i] for n, i in captured.leaves.items()}}


def run_whole(captured: Captured, values: dict[str, torch.Tensor]) -> torch.Tensor:
    places = [n.name for n in captured.graph.nodes if n.op == "placeholder"]
    out = Replay(captured.graph).run(*[values[p] for p in places])
    return out[0] if isinstance(out, (tuple, list)) else out


def run_stages(forwards: tuple[Forward, ...], values: dict[str, torch.Tensor]) -> torch.Tensor:
    """Stage after stage, each given only its placeholders and what the stage before returned."""
    passed: dict[str, torch.Tensor] = {}
    for f in forwards:
        places = [n.name for n in f.graph.nodes if n.op == "placeholder"]
        assert places == [*f.params, *f.buffers, *f.constants, *f.leaves, *f.inputs]
        outputs = Replay(f.graph).run(*[passed[p] if p in f.inputs else values[p] for p in places])
        passed = dict(zip(f.outputs, outputs, strict=True))
    (loss,) = passed.values()
    return loss


@TRACED
@given(random_nets(), st.integers(1, 6), st.integers(0, 99))
def test_stages_compute_what_the_whole_computes(net: RandomNet, num_stages: int, seed: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    captured = captured_of(net, x)
    forwards = cut(captured, min(num_stages, most_stages(captured)))
    with torch.no_grad():
        wanted = run_whole(captured, values_of(captured, net, x))
        assert torch.equal(run_stages(forwards, values_of(captured, net, x)), wanted)
    assert all(a.outputs == b.inputs for a, b in pairwise(forwards))
    assert forwards[-1].outputs == tuple(n.name for n in outputs_of(captured.graph))
    computed = [n.name for f in forwards for n in f.graph.nodes if n.op == "call_function"]
    free = {n.name for n in replicated(captured, written_storages(captured))} | {n.name for n in bases(captured)}
    again = {n for n in computed if computed.count(n) > 1}
    assert again <= free, f"{again - free} are computed by several stages"


@TRACED
@given(random_nets(), st.integers(2, 4))
def test_the_chosen_cuts_are_the_best_of_all(net: RandomNet, num_stages: int) -> None:
    """Brute force over every allowed set of cuts of the graph: none has a smaller largest load."""
    captured = captured_of(net, torch.randn(4, 6))
    most = most_stages(captured)
    num_stages = min(num_stages, most)
    allowed = [f.start for f in cut(captured, most)[1:]]
    work = seconds_of_nodes(captured)
    crossing = {c: message(captured, cut(captured, 2, cuts=(c,))[1]) for c in allowed}

    def largest_load(cuts: tuple[int, ...]) -> float:
        ends = [0, *cuts, len(work)]
        return max(sum(work[a:b]) + crossing.get(a, 0.0) + crossing.get(b, 0.0) for a, b in pairwise(ends))

    chosen = tuple(f.start for f in cut(captured, num_stages)[1:])
    assert largest_load(chosen) == pytest.approx(min(map(largest_load, combinations(allowed, num_stages - 1))), rel=1e-9)


def seconds_of_nodes(captured: Captured) -> list[float]:
    """The rule written out again: forward seconds, thrice where there is a backward, and the traffic of gradients."""
    free = replicated(captured, written_storages(captured))
    work = []
    for n in captured.graph.nodes:
        if n.op == "call_function" and n not in free:
            params = [p for p in n.all_input_nodes if p.name in captured.params and p.meta["grad"]]
            traffic = sum(4.0 * p.meta["val"].nbytes / 1e10 for p in params)
            work.append(n.meta["seconds"] * (3 if n.meta["grad"] else 1) + traffic)
    return work


def message(captured: Captured, behind: Forward) -> float:
    """Seconds of what crosses the cut before a stage: values, gradients of what is used behind it, and the latency."""
    free = replicated(captured, written_storages(captured))
    users = set([n for n in captured.graph.nodes if n.op == "call_function" and n not in free][behind.start :])
    by_name = {n.name: n for n in captured.graph.nodes}
    values = [by_name[n] for n in (*behind.inputs, *behind.views_in)]
    moved = sum(v.meta["val"].nbytes for v in values[: len(behind.inputs)])
    moved += sum(v.meta["val"].nbytes for v in values if v.meta["grad"] and users & set(v.users))
    return moved / LINK.bandwidth + LINK.latency if values else 0.0


# ---------------------------------------------------------------- what a cut may not tear, and what crosses


class Inplace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        v = h[:, :3]
        other = torch.tanh(self.b(x))
        v.mul_(2.0)
        return (h * other).square().mean()


def test_a_value_is_never_cut_from_its_last_in_place_write() -> None:
    captured = captured_of(Inplace(), torch.randn(4, 6))
    for forwards in (cut(captured, n) for n in range(1, most_stages(captured) + 1)):
        homes = {n.name: f.index for f in forwards for n in f.graph.nodes if n.op == "call_function"}
        assert homes["linear"] == homes["mul_"]


@pytest.mark.parametrize(
    "kinds, skips, seed, num_stages",
    [(("norm", "chunk"), (3, 1), 2, 2), (("norm", "linear", "scale", "chunk", "shared"), (0, 3, 0, 0, 2), 1, 4)],
)
def test_gradients_through_views_are_added_in_the_same_order(
    kinds: tuple[str, ...], skips: tuple[int, ...], seed: int, num_stages: int
) -> None:
    """Three terms, one through a chunk that two stages would take: a cut between them changed the last bit of the sum."""
    torch.manual_seed(seed)
    case = Case(RandomNet(kinds, skips).train(), own_loss, rows)
    model = case.fresh()
    pipe = zbfx.compile(model, num_stages, loss=own_loss, microbatches=1)
    assert differences(model, pipe.step(*rows(4)[0]), Reference(case, 4).step(1)) == []


def own_loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output


def rows(n: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return (torch.randn(n, 6, generator=torch.Generator().manual_seed(n)),), {}, None


def test_views_of_one_chunk_do_not_keep_their_users_together() -> None:
    """Pieces do not overlap, so a cut may fall between the users of different ones."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 18), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c = self.a(x).chunk(3, dim=1)
            return (self.b(torch.tanh(a)) * torch.tanh(b) + c).square().mean()

    captured = captured_of(Gated(), torch.randn(4, 6))
    names = [n.name for n in captured.graph.nodes if n.op == "call_function"]
    starts = {names[f.start] for f in cut(captured, most_stages(captured))}
    assert {"linear_1", "tanh_1", "mul", "add"} <= starts


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.layers[0](x))
        h = first
        for layer in self.layers[1:]:
            h = torch.tanh(layer(h))
        return (h * first).square().mean()


def test_a_value_used_stages_later_is_passed_along() -> None:
    forwards = cut(captured_of(Skip(), torch.randn(4, 6)), 4, pins=["layers.1", "layers.2", "layers.3"])
    assert [f.inputs for f in forwards] == [(), ("tanh",), ("tanh", "tanh_1"), ("tanh", "tanh_2")]


def test_pins_and_earlier_cuts_are_kept() -> None:
    captured = captured_of(Skip(), torch.randn(4, 6))
    forwards = cut(captured, 3, pins=["layers.2"])
    assert any(f.params and captured.params[f.params[0]].startswith("layers.2") for f in forwards[1:])
    again = cut(captured, 3, cuts=[f.start for f in forwards[1:]])
    assert [str(f.graph) for f in again] == [str(f.graph) for f in forwards]


@TRACED
@given(random_nets(), st.integers(1, 4), st.integers(1, 9))
def test_another_batch_size_keeps_every_parameter_on_its_stage(net: RandomNet, num_stages: int, samples: int) -> None:
    captured, other = captured_of(net, torch.randn(4, 6)), captured_of(net, torch.randn(samples, 6))
    num_stages = min(num_stages, most_stages(captured))

    def owners(c: Captured, forwards: tuple[Forward, ...]) -> dict[str, int]:
        return {c.params[p]: f.index for f in reversed(forwards) for p in f.params}

    wanted = owners(captured, cut(captured, num_stages))
    if "shared.weight" in wanted and any("shared" in k for k in net.kinds):
        return  # a parameter of several stages: its first stage alone says too little
    cuts = cuts_for_owners(other, wanted, num_stages)
    assert owners(other, cut(other, num_stages, cuts=cuts)) == wanted


def test_one_stage_too_many_is_refused_with_the_number_that_works() -> None:
    captured = captured_of(Skip(), torch.randn(4, 6))
    most = most_stages(captured)
    assert len(cut(captured, most)) == most
    with pytest.raises(PartitionError, match=re.escape(f"num_stages={most + 1}, but the graph can be cut into at most {most}")):
        cut(captured, most + 1)


def test_pins_that_tear_are_refused_with_the_line() -> None:
    class Torn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Hardtanh(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)).square().mean()

    with pytest.raises(PartitionError, match=r"cannot cut before module 'b' \(.*: an in-place operation spans it"):
        cut(captured_of(Torn(), torch.randn(4, 6)), 2, pins=["b"])


def test_text_of_the_stages(golden: Any) -> None:
    net = RandomNet(("linear", "norm", "chunk", "inplace", "scale"), (0, 0, 0, 2, 0))
    text = []
    for f in cut(captured_of(net, torch.randn(4, 6)), 3):
        nodes = [f"{n.name} = {n.target}{n.args}" for n in f.graph.nodes if n.op == "call_function"]
        text.append(f"stage {f.index}: {', '.join(f.inputs) or 'nothing'} -> {', '.join(f.outputs)}\n  " + "\n  ".join(nodes))
    golden("\n".join(text))


# ---------------------------------------------------------------- replicated values


class Masked(nn.Module):
    """A mask and a rotary-like table made from inputs and a buffer alone, used by every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("frequency", torch.arange(6.0))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        mask = (ids > 2).float()[:, None]
        table = torch.cos(ids[:, None] * self.frequency)
        for layer in self.layers:
            x = torch.tanh(layer(x) * table) * mask
        return x.square().mean()


def test_values_of_inputs_alone_are_made_again_and_never_sent() -> None:
    captured = captured_of(Masked(), torch.randn(4, 6), torch.arange(4))
    forwards = cut(captured, 3, pins=["layers.1", "layers.2"])
    for f in forwards:
        made = [str(n.target) for n in f.graph.nodes if n.op == "call_function"]
        assert made.count("aten.cos.default") == made.count("aten.gt.Scalar") == 1
        assert [captured.buffers[b] for b in f.buffers] == ["frequency"]
    assert [len(f.inputs) for f in forwards] == [0, 1, 1]
    assert [f.leaves for f in forwards] == [("args_0", "args_1"), ("args_1",), ("args_1",)]


def test_what_changes_or_is_random_or_needs_a_gradient_is_never_replicated() -> None:
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1.0)
            noise = torch.rand_like(x)
            return (self.a(x) * noise * (self.count + 1.0)).square().mean()

    captured = captured_of(Random(), torch.randn(4, 6))
    free = {n.name for n in replicated(captured, written_storages(captured))}
    assert not {"add_", "rand_like", "linear", "b_model_count"} & free and "args_0" in free


@pytest.mark.parametrize("what", ["an input", "a parameter"])
def test_writing_into_an_input_or_parameter_is_refused(what: str) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if what == "an input":
                x.add_(1.0)
            else:
                self.a.bias.detach().mul_(0.5)
            return self.a(x).square().mean()

    with pytest.raises(InputError, match=rf"test_partition.py:\d+: .* changes '.*', {what}, in place"):
        cut(captured_of(Writes(), torch.randn(4, 6)), 1)


def test_a_forward_that_lacks_a_value_is_noticed() -> None:
    """The reconstruction above can fail: a stage without its input cannot run."""
    captured = captured_of(Skip(), torch.randn(4, 6))
    forwards = cut(captured, 2)
    broken = (forwards[0], replace(forwards[1], inputs=forwards[1].inputs[:-1]))
    with pytest.raises((AssertionError, KeyError)):
        run_stages(broken, values_of(captured, Skip(), torch.randn(4, 6)))


def test_a_graphs_names_are_the_captured_ones() -> None:
    captured = captured_of(Skip(), torch.randn(4, 6))
    known = {n.name for n in captured.graph.nodes}
    for f in cut(captured, 3):
        assert isinstance(f.graph, fx.Graph) and {n.name for n in f.graph.nodes if n.op != "output"} <= known
