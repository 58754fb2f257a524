"""B and W together are the unsplit backward: the same bits, no operator twice; fused operators are told apart."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from tests.passes.graphs import TRACED, RandomNet, captured_of, cut, most_stages, random_nets, split
from zbfx.errors import VerifyError
from zbfx.ir import Fn, Joint, Stage
from zbfx.passes.split_backward import split_backward
from zbfx.storage import is_view, mutates
from zbfx.verify_program import verify_stage

aten = torch.ops.aten


def real(node: fx.Node, generator: torch.Generator) -> torch.Tensor:
    """Random values of a placeholder's type and layout."""
    fake = node.meta["val"]
    out = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    if not fake.dtype.is_floating_point:
        return out.copy_(torch.randint(0, 4, fake.shape, generator=generator))
    return out.copy_(torch.rand(fake.shape, generator=generator) + 0.5)


def interpret(graph: fx.Graph, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run a graph on copies, so that what it writes into its buffers stays its own affair."""
    with torch.no_grad():
        return fx.Interpreter(nn.Module(), graph=graph).run(*[a.clone() for a in args])


def call(fn: Fn, groups: dict[str, list[torch.Tensor]]) -> None:
    """Run a stage function on its groups; its output groups are added to them."""
    flat = [t for group in fn.takes for t in groups[group]]
    assert len(flat) == sum(map(len, fn.takes.values()))
    results = iter(interpret(fn.graph, *flat))
    for group, count in fn.gives.items():
        groups[group] = [next(results) for _ in range(count)]


def check_equal(joint: Joint, stage: Stage) -> None:
    """F, then B, then W give what the joint graph gives, bit for bit."""
    places = [n for n in joint.graph.nodes if n.op == "placeholder"]
    generator = torch.Generator().manual_seed(0)
    values = [real(n, generator) for n in places]
    wanted = interpret(joint.graph, *values)
    nx, nc, ngy = len(joint.forward.inputs), len(joint.forward.leaves), len(joint.tangents)
    end = len(values) - ngy
    groups = {
        "p": values[: end - nx - nc], "c": values[end - nx - nc : end - nx], "x": values[end - nx : end], "gy": values[end:],
    }  # fmt: skip
    for fn in (stage.F, stage.B, stage.W):
        if fn is not None:
            call(fn, groups)
    got = [*groups["y"], *groups.get("gx", ()), *groups.get("gp", ())]
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"output {i} of stage {stage.index}"


def work(graphs: list[fx.Graph]) -> Counter[str]:
    """How often each operator is computed; of one with an output mask, each result counts. Views and copies compute nothing."""
    found: Counter[str] = Counter()
    for graph in graphs:
        for node in graph.nodes:
            if node.op != "call_function" or node.target in (operator.getitem, aten.clone.default) or is_view(node.target):
                continue
            masked = [a.name for a in node.target._schema.arguments if a.name in ("output_mask", "grad_input_mask")]
            found[str(node.target)] += len({u.args[1] for u in node.users}) if masked else 1
    return found


def functions(stage: Stage) -> list[fx.Graph]:
    return [fn.graph for fn in (stage.F, stage.B, stage.W) if fn is not None]


@TRACED
@given(random_nets(), st.integers(1, 4))
def test_random_graphs(net: RandomNet, num_stages: int) -> None:
    captured = captured_of(net, torch.randn(4, 6))
    forwards = cut(captured, min(num_stages, most_stages(captured)))
    for joint, stage in split(captured, forwards):
        verify_stage(stage)
        check_equal(joint, stage)
        strict = split_backward(joint, captured, recompute=False)
        verify_stage(strict)
        check_equal(joint, strict)
        assert work(functions(strict)) == work([joint.graph])
        assert work(functions(stage)) >= work([joint.graph])


def layers(*modules: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*modules).train()


FUSED: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "layer norm": (nn.LayerNorm(6), (4, 6), "native_layer_norm_backward"),
    "group norm": (nn.GroupNorm(2, 6), (4, 6, 5), "native_group_norm_backward"),
    "batch norm": (nn.BatchNorm1d(6), (4, 6, 5), "native_batch_norm_backward"),
    "instance norm": (nn.InstanceNorm1d(6, affine=True), (4, 6, 5), "native_batch_norm_backward"),
    "convolution": (nn.Conv1d(6, 6, 3, padding=1), (4, 6, 5), "convolution_backward"),
    "transposed": (nn.ConvTranspose1d(6, 6, 3, padding=1), (4, 6, 5), "convolution_backward"),
    "grouped": (nn.Conv1d(6, 6, 1, groups=2, bias=False), (4, 6, 5), "convolution_backward"),
    "3d": (nn.Conv3d(2, 2, 3), (2, 2, 4, 4, 4), "convolution_backward"),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_backward_operators_are_split_by_their_mask(name: str) -> None:
    """In the middle stage of three, B has the operator's input gradient alone, W its weights' alone."""
    module, shape, target = FUSED[name]
    captured = captured_of(layers(nn.PReLU(), nn.Identity(), module, nn.PReLU()), torch.randn(shape), loss=_loss)
    forwards = cut(captured, 3, pins=["2", "3"])
    joint, stage = split(captured, forwards)[1]
    check_equal(joint, stage)
    masks = {}
    for letter, fn in (("B", stage.B), ("W", stage.W)):
        assert fn is not None
        (node,) = (n for n in fn.graph.nodes if target in str(n.target))
        masks[letter] = next(a for a in node.args[::-1] if isinstance(a, list) and a and isinstance(a[0], bool))
    assert masks["B"] == [True, False, False]
    assert masks["W"][0] is False and masks["W"][1] is True
    assert work(functions(split_backward(joint, captured, recompute=False))) == work([joint.graph])


def _loss(out: torch.Tensor, target: Any) -> torch.Tensor:
    return out.square().mean()


def test_a_parameter_used_several_times_gets_the_sum() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(torch.tanh(self.own(x)))
            return torch.tanh(self.inner(torch.tanh(self.inner(h) + h))).square().mean()

    captured = captured_of(Twice(), torch.randn(4, 6))
    for joint, stage in split(captured, cut(captured, 2, pins=["inner"])):
        check_equal(joint, stage)
        assert len(stage.gparams) == 2 and stage.W is not None and stage.W.gives["gp"] == 2


def test_without_a_gradient_to_send_B_is_empty_and_W_is_the_whole_backward() -> None:
    captured = captured_of(layers(nn.Linear(6, 6), nn.LayerNorm(6)), torch.randn(4, 6), loss=_loss)
    ((joint, stage),) = split(captured, cut(captured, 1))
    assert stage.B is None and stage.W is not None
    check_equal(joint, stage)
    assert work(functions(stage)) == work([joint.graph])


def test_nothing_is_saved_twice_and_views_never() -> None:
    """Every saved value is a storage of its own, and none is a parameter, a buffer or an input leaf."""
    captured = captured_of(layers(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(4, 6), loss=_loss)
    for _, stage in split(captured, cut(captured, 2)):
        fixed = {*stage.F.takes["p"], *stage.F.takes["c"]}
        for fn, group in ((stage.F, "s"), (stage.B, "k")):
            if fn is not None:
                start = sum(n for g, n in fn.gives.items() if list(fn.gives).index(g) < list(fn.gives).index(group))
                saved = fn.outputs[start : start + fn.gives[group]]
                assert len(set(saved)) == len(saved)
                assert not any(n.name in fixed or (n.op == "call_function" and is_view(n.target)) for n in saved)


def test_gradients_own_their_storage() -> None:
    """A gradient that is a view of another (a bias added twice) is copied: accumulation writes into it."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.a + self.b).square().mean()

    captured = captured_of(Shares(), torch.randn(4, 6))
    ((joint, stage),) = split(captured, cut(captured, 1))
    check_equal(joint, stage)
    assert stage.W is not None
    assert len({n for n in stage.W.outputs}) == 2
    groups: dict[str, list[torch.Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    by_name = {n.name: n for n in [*stage.F.graph.nodes, *stage.W.graph.nodes] if n.op == "placeholder"}
    for group in ("p", "c", "x", "gy"):
        groups[group] = [real(by_name[n], generator) for n in (stage.F.takes.get(group) or stage.W.takes.get(group, ()))]
    call(stage.F, groups)
    call(stage.W, groups)
    assert len({g.untyped_storage().data_ptr() for g in groups["gp"]}) == 2


def test_writes_into_buffers_are_F_alone() -> None:
    captured = captured_of(layers(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)), torch.randn(4, 6), loss=_loss)
    for _, stage in split(captured, cut(captured, 2)):
        for fn in (stage.B, stage.W):
            assert fn is None or not any(mutates(n.target) for n in fn.graph.nodes if n.op == "call_function")


def test_the_joint_graph_is_not_changed() -> None:
    captured = captured_of(layers(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)), torch.randn(4, 6), loss=_loss)
    joint, _ = split(captured, cut(captured, 2))[1]
    before = str(joint.graph)
    split_backward(joint, captured)
    assert str(joint.graph) == before


def test_text_of_a_stage(golden: Any) -> None:
    captured = captured_of(layers(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6)), torch.randn(4, 6), loss=_loss)
    _, stage = split(captured, cut(captured, 2, pins=["1"]))[1]
    golden("\n\n".join(f"{letter}:\n{fn}" for letter, fn in (("F", stage.F), ("B", stage.B), ("W", stage.W))))


# ---------------------------------------------------------------- the verifier refuses


@pytest.fixture
def stage() -> Stage:
    captured = captured_of(layers(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(4, 6), loss=_loss)
    return split(captured, cut(captured, 2))[1][1]


def test_the_verifier_refuses_groups_that_do_not_fit(stage: Stage) -> None:
    assert stage.B is not None and stage.W is not None
    verify_stage(stage)
    fewer = {**stage.F.gives, "s": stage.F.gives["s"] - 1}
    more = {**stage.B.gives, "k": stage.B.gives["k"] - 1, "gx": stage.B.gives["gx"] + 1}
    renamed = {**stage.W.takes, "k": tuple(reversed(stage.W.takes["k"]))}
    for broken, place in [
        (replace(stage, F=replace(stage.F, gives=fewer)), "stage 1 F: its graph returns"),
        (replace(stage, B=replace(stage.B, gives=more)), r"stage 1: B keeps \d values, W takes \d"),
        (replace(stage, W=replace(stage.W, takes=renamed)), "stage 1 W: its graph takes"),
        (replace(stage, B=None), r"stage 1: F saves \d values, W takes 0"),
    ]:
        with pytest.raises(VerifyError, match=place):
            verify_stage(broken)


def test_the_verifier_refuses_nodes_without_type_and_shows_the_function(stage: Stage) -> None:
    graph = fx.Graph()
    graph.output(graph.graph_copy(stage.F.graph, {}))
    next(n for n in graph.nodes if n.target is aten.addmm.default).meta.pop("val")
    with pytest.raises(VerifyError, match=r"stage 1 F: \['addmm'\] have no type(.|\n)*return"):
        verify_stage(replace(stage, F=replace(stage.F, graph=graph)))
