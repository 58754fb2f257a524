"""Pipeline: what `zbfx.compile` returns. It trains the user's own parameters through the generated programs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zbfx.batch import Batch, read_batch
from zbfx.compile import Options, build_plan, reorder
from zbfx.engine import Engine, Observed
from zbfx.errors import InputError, PlanError
from zbfx.holdings import Holdings, Init, refuse_several_devices
from zbfx.ir import Schedule
from zbfx.ordering import Search, check_search, chunks_of
from zbfx.plan import Plan, load_plan
from zbfx.runtime import agree
from zbfx.runtime.launch import place
from zbfx.text import parse_size
from zbfx.trace.state import same_numbers
from zbfx.trace.whole import Loss
from zbfx.training import MakeOptimizer, Training
from zbfx.updating import Progress, Updating

_REDUCTIONS = ("mean", "sum")


def compile(
    model: torch.nn.Module,
    num_stages: int,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    loss: Loss | None = None,
    microbatches: int | None = None,
    ranks: int | None = None,
    schedule: str | Schedule = "zb-h1",
    memory: str | int | None = None,
    placement: str | Sequence[int] | None = None,
    objective: str | None = None,
    w_parts: int = 1,
    seconds: float | None = None,
    cuts: Sequence[str] = (),
    reduction: str = "mean",
    shared: Sequence[str] = (),
    device: str | torch.device | None = None,
    init: Init | None = None,
    seed: int | None = None,
    optimizer: MakeOptimizer | None = None,
    weights: str = "synchronous",
    max_norm: float | None = None,
    loss_scale: float | str | None = None,
    rollback: str = "exact",
    masters: bool = False,
    correction: str | None = None,
    dead_after: float = 5.0,
    timeout: float = 1800.0,
) -> Pipeline:
    """Compile a model into `num_stages` pipeline stages; returns a Pipeline that trains it.

    example_inputs, example_kwargs, example_target: a whole batch like those `step` will get; with them compilation happens now
    (a missing target is taken from the model's output where loss allows), without at the first step.
    loss: fn(output, target) -> scalar; absent when the model returns its own loss. microbatches: slices of a batch per step,
    2 * num_stages by default. ranks: workers, the size of the process group or num_stages by default. schedule: "gpipe",
    "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v" and more by name, "auto" (searched within `memory`), "zb-1p" and "zb-2p"
    (searched within 1 or 2 times as many activations as ranks), "exact" (proven optimal or with a proven bound; needs
    zbfx[exact]), or a Schedule. placement: the rank of each stage, by name ("blocks", "interleaved", "v", "zigzag") or as a
    list, or "auto" (searched); by default what the schedule is made for. objective of a search: "makespan", or "span" where
    steps follow one another without a barrier. w_parts: a search divides W into as many parts, by parameters. seconds: the
    search's budget (by size by default, 30 for exact). memory: limit of bytes per rank ("24GiB") for parameters, their
    gradients, buffers and activations. cuts: module names before which a stage must begin. reduction: "mean" divides each
    microbatch's loss by their number; "sum" does not. shared: keywords of tensors that go whole to every microbatch. device:
    "cuda" by default where a process group is and CUDA is there, else where the parameters lie. init: for models on the meta
    device, fn(name, tensor) that fills a parameter in place, or a state dict. seed: of dropout and the like (torch's initial
    seed by default): masks depend on it, the step, the microbatch and the operator, not on stages, ranks or schedule.
    optimizer: fn(parameters) -> torch.optim.Optimizer: `step` then updates the weights too; `pipe.optimizer` is the result, for
    learning-rate schedulers. weights: when they change: "synchronous" (at the end of a step), "post-validation" (at once, on
    what each rank knows, mended if that was wrong; the same bits, and no barrier) or "2bw" (one step late, and no barrier).
    max_norm: clip the gradients' joint norm. loss_scale: a number, or "dynamic", for half precision; steps with gradients that
    are not finite are skipped wherever max_norm or loss_scale is given. rollback: "exact" or "inverse". masters: step float32
    copies of half-precision parameters. correction: of 2bw's delay, "predict" (forward and
    backward run on weights that are ahead by the last step's change; costs one more copy of the weights) or "taylor".
    dead_after: seconds without a heartbeat after which another process counts as dead; timeout: seconds that a live one may
    let others wait for a message.

    Raises InputError, TraceError, PartitionError, ScheduleError, MemoryBudgetError.
    """
    where = place()
    size = where.size if where is not None and where.size > 1 else None
    if not isinstance(num_stages, int) or num_stages < 1:
        raise InputError(f"{num_stages=}: a pipeline has at least 1 stage")
    microbatches = 2 * num_stages if microbatches is None else microbatches
    if not isinstance(microbatches, int) or microbatches < 1:
        raise InputError(f"{microbatches=}: a step needs at least 1 microbatch")
    ranks = ranks or (
        len(schedule.ranks) if isinstance(schedule, Schedule) else size or max(1, num_stages // chunks_of(schedule))
    )
    if size is not None and ranks != size:
        raise InputError(f"{ranks=}, but the process group has {size} processes: leave ranks out, or start {ranks} processes")
    if reduction not in _REDUCTIONS:
        raise InputError(f"{reduction=}: choose one of {_REDUCTIONS}")
    device = _device(model, device, size is not None)
    sharing = None if size is None else partial(agree, device=device, timeout=timeout)
    options = Options(
        num_stages,
        microbatches,
        ranks,
        schedule,
        None if memory is None else parse_size(memory),
        tuple(cuts),
        reduction,
        device,
        seed,
        placement if placement is None or isinstance(placement, str) else tuple(placement),
        dead_after,
        timeout,
        Search(objective or ("makespan" if weights == "synchronous" else "span"), w_parts, seconds, sharing),
        _training(optimizer, weights, max_norm, loss_scale, rollback, masters, correction),
    )
    check_search(options.search, schedule, options.placement)
    if not 0 < dead_after <= timeout:
        raise InputError(f"{dead_after=}, {timeout=}: seconds, with 0 < dead_after <= timeout")
    pipe = Pipeline(model, options, loss=loss, shared=tuple(shared), init=init)
    if example_inputs is not None or example_kwargs is not None:
        pipe.prepare(*(example_inputs or ()), target=example_target, **(example_kwargs or {}))
    return pipe


def _training(optimizer: MakeOptimizer | None, weights: str, *rest: Any) -> Training | None:
    """What the optimizer's keywords say; without one, nothing may be asked of it."""
    if optimizer is not None:
        return Training(optimizer, weights, *rest)
    names = ("max_norm", "loss_scale", "rollback", "masters", "correction")
    given = [n for n, v, usual in zip(names, rest, (None, None, "exact", False, None), strict=True) if v != usual]
    if weights != "synchronous" or given:
        asked = ", ".join([*(["weights"] if weights != "synchronous" else []), *given])
        raise InputError(f"{asked}: needs optimizer=, a function such as lambda params: torch.optim.AdamW(params, lr=1e-3)")
    return None


def _device(model: torch.nn.Module, asked: str | torch.device | None, distributed: bool) -> torch.device:
    if asked is None:
        first = next(model.parameters(), None)
        at = torch.device("cpu") if first is None or first.is_meta else first.device
        asked = "cuda" if distributed and torch.cuda.is_available() else at
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise InputError(f"device={asked!r} is no device: zbfx runs on cpu and cuda") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                f"device={str(device)!r}, but this machine has no CUDA device: kernels are chosen where they run, so compile on "
                'the GPU machine, or pass device="cpu"'
            )
        local = int(os.environ.get("LOCAL_RANK", "0")) if distributed else torch.cuda.current_device()
        return torch.device("cuda", device.index if device.index is not None else local)
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device={str(device)!r}: zbfx runs on cpu and cuda")
    return device


class Pipeline:
    """A compiled model. `step` trains, `eval_step` evaluates, `plan` shows everything."""

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        *,
        loss: Loss | None = None,
        shared: tuple[str, ...] = (),
        init: Init | None = None,
        plan: Plan | None = None,
    ) -> None:
        self._model, self._options, self._loss, self._shared = model, options, loss, shared
        where = place()
        partial = where is not None and where.size > 1
        refuse_several_devices(model, filled=init is not None or partial)
        self._holdings = Holdings(model, options.device, init)
        self._holdings.is_partial = partial
        self._engine: Engine | None = None
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._current: Plan | None = None
        if plan is not None:
            self._adopt(plan)
            self._loaded: Plan | None = plan
        else:
            self._loaded = None

    # ------------------------------------------------------------ training and evaluation

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """One step over a batch: forward and backward of every microbatch, gradients added to the parameters' `.grad`; with
        `optimizer=`, the weights are updated in their place.

        Returns the loss (0-dim, detached) on every rank: the mean (or sum) over microbatches. The batch is cut along dimension 0;
        it must divide by `microbatches`. New input shapes are compiled for on sight. Raises InputError before anything
        ran, RankError if a rank failed. 2bw: the loss is that of the step before (NaN at the first), for this batch's last
        microbatches are still on their way; `flush` returns the last one's.
        """
        batch = self._read(args, kwargs, target)
        plan = self._plan_for(batch, forward_only=False)
        self._current = plan
        return self._running(plan).run(plan, batch)

    def eval_step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """The loss of a batch, forward only, as `model.eval()` would compute it: no dropout, statistics used and not updated.

        Changes nothing that training can see. Returns the loss on every rank.
        """
        batch = self._read(args, kwargs, target)
        if self._current is None:
            self._current = self._plan_for(batch, forward_only=False)
        plan = self._plan_for(batch, forward_only=True)
        return self._running(self._current).run(plan, batch)

    def plan_for(self, *args: Any, target: Any = None, **kwargs: Any) -> Plan:
        """The plan for a batch like this one. No parameter is touched: they may lie on the meta device and have no values."""
        return self._plan_for(self._read(args, kwargs, target), forward_only=False)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for a batch, as `model.eval()` and torch.no_grad() would give them, in the model's own structure.

        Outputs with a batch dimension are joined along it; others (a scalar per microbatch) are stacked. On every rank.
        """
        batch = self._read(args, kwargs, None)
        plan = self._plan_for(batch, forward_only=True, predict=True)
        return self._running(self._current or plan).predict(plan, batch)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that `optimizer=` gave, over the parameters (or masters) of this process. Raises InputError."""
        return self._updating().optimizer

    def flush(self) -> torch.Tensor | None:
        """Complete the last step: afterwards the weights are final. All ranks call it.

        Post-validation: the last step is validated, which changes no result; `eval_step`, `predict` and `state_dict` do it by
        themselves. 2bw: the stream of steps ends, and its last loss is returned; the next step begins another.
        """
        return None if self._engine is None else self._engine.flush()

    @property
    def progress(self) -> Progress:
        """Steps validated so far, clipped, skipped, taken back; the last joint norm and the loss's scale."""
        return self._updating().progress()

    def _updating(self) -> Updating:
        if self._options.training is None:
            raise InputError("the pipeline has no optimizer: pass optimizer= to zbfx.compile, or step your own")
        if self._engine is None or self._engine.updating is None:
            raise InputError("nothing is compiled yet: pass example_inputs to zbfx.compile, or run a step")
        return self._engine.updating

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of all ranks so that their joint norm is at most max_norm; returns the norm before.

        Equal to torch.nn.utils.clip_grad_norm_ over the whole model in one process. All ranks call it, after `step`.
        """
        plan = self.plan
        return self._running(plan).clip_grad_norm_(plan, max_norm, norm_type)

    def prepare(self, *args: Any, target: Any = None, **kwargs: Any) -> Plan:
        """Compile for a batch like this one, without running it."""
        batch = self._read(args, kwargs, target)
        self._current = self._plan_for(batch, forward_only=False)
        self._running(self._current)
        return self._current

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Batch:
        return read_batch(args, kwargs, target, self._options.microbatches, self._shared)

    def _plan_for(self, batch: Batch, *, forward_only: bool, predict: bool = False) -> Plan:
        key = (forward_only, predict, self._mode(), *batch.key())
        if key not in self._plans or not self._same_numbers(self._plans[key]):
            fits = self._loaded is not None and not forward_only and _fits(self._loaded, batch)
            self._plans[key] = self._loaded if fits and self._loaded is not None else self._build(batch, forward_only, predict)
        return self._plans[key]

    def _same_numbers(self, plan: Plan) -> bool:
        """False once a number in a module's attributes that forward read (a rate, a temperature) is another than in the trace."""
        captured = dict(plan.history).get("capture")
        return captured is None or same_numbers(self._model, captured.numbers)

    def _mode(self) -> tuple[Any, ...]:
        """What a trace depends on besides its inputs: training flags, types and frozen parameters, autocast."""
        kind = self._options.device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        frozen = tuple((p.requires_grad, p.dtype) for p in self._model.parameters())
        return (*autocast, tuple(m.training for m in self._model.modules()), frozen)

    def _build(self, batch: Batch, forward_only: bool, predict: bool) -> Plan:
        args, kwargs, target = batch.example()
        like = self._current or self._loaded or next(iter(self._plans.values()), None)
        with _evaluating(self._model) if forward_only else _as_it_is():
            return build_plan(
                self._model,
                args,
                kwargs,
                target,
                loss=self._loss,
                options=self._options,
                like=like,
                forward_only=forward_only,
                predict=predict,
            )

    def _running(self, plan: Plan) -> Engine:
        self._holdings.refuse_replaced()
        if self._engine is None:
            self._adopt(plan)
        assert self._engine is not None  # made by _adopt
        return self._engine

    def _adopt(self, plan: Plan) -> None:
        """The first plan decides which rank holds which parameters."""
        self._engine = Engine(self._holdings, plan, self._options)

    # ------------------------------------------------------------ what is compiled

    @property
    def plan(self) -> Plan:
        """The plan of the last training step (or of the example inputs). Raises InputError before there is one."""
        if self._current is None and self._loaded is None:
            raise InputError("nothing is compiled yet: pass example_inputs to zbfx.compile, or run a step")
        return self._current or self._loaded  # type: ignore[return-value]

    def reschedule(
        self, schedule: str | Schedule | None = None, *, microbatches: int | None = None, memory: str | int | None = None
    ) -> Pipeline:
        """The same stages and parameters under another schedule or number of microbatches (of the same size), at once.

        Returns this pipeline. Batches given to `step` must have microbatches times the microbatch's samples.
        """
        options = replace(
            self._options,
            schedule=schedule or self._options.schedule,
            microbatches=microbatches or self._options.microbatches,
            memory=self._options.memory if memory is None else parse_size(memory),
        )
        plans = {key: reorder(plan, options) for key, plan in self._plans.items() if not key[0]}
        current = next((k for k, p in self._plans.items() if p is self._current), None)
        self._options, self._plans = options, plans
        self._current = plans.get(current) if current is not None else None
        return self

    # ------------------------------------------------------------ the user's parameters

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(the user's name, parameter) of what this process holds: all without a process group, else this rank's part."""
        return self._held().named_parameters()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters this process holds: give them to your optimizer."""
        return (p for _, p in self.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The user's names -> parameters and buffers that this process holds.

        Post-validation: all ranks call it, for it validates the last step. 2bw, within a stream: a copy of the newest weights
        that every rank has; the optimizer's state is of one step with them after `flush` only.
        """
        if self._engine is not None and self._engine.streams:
            return self._engine.consistent_state()
        self.flush()
        return self._held().state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy values into the parameters and buffers this process holds; `state` may hold more. Raises InputError."""
        if self._engine is not None:
            self._engine.restart()
        self.flush()
        self._held().load_state_dict(state)
        if self._engine is not None and self._engine.updating is not None:
            self._engine.updating.take_values()

    def _held(self) -> Holdings:
        if self._holdings.is_partial and self._engine is None:
            raise InputError(
                "which parameters this rank holds is known once compiled: pass example_inputs to zbfx.compile, or run a step"
            )
        return self._holdings

    # ------------------------------------------------------------ watching

    def watch(self, *, times: bool = True, memory: bool = False) -> None:
        """Record the next steps: start and end of every action, and (memory) exact bytes. Read `observed` after a step."""
        if self._engine is None:
            raise InputError("nothing is compiled yet: pass example_inputs to zbfx.compile, or run a step")
        self._engine.watch(times=times, memory=memory)

    @property
    def observed(self) -> Observed:
        """What the last watched step did: a measured Timeline and, with memory, peak bytes of activations per rank."""
        if self._engine is None or self._engine.observed is None:
            raise InputError("nothing was recorded: call watch() before a step")
        return self._engine.observed

    def close(self) -> None:
        """Give back what ranks in several processes share (connections, heartbeats)."""
        if self._engine is not None:
            self._engine.close()


def load(
    folder: str | Path,
    model: torch.nn.Module,
    *,
    loss: Loss | None = None,
    device: str | torch.device | None = None,
    init: Init | None = None,
    shared: Sequence[str] = (),
    optimizer: MakeOptimizer | None = None,
    max_norm: float | None = None,
    loss_scale: float | str | None = None,
    rollback: str = "exact",
    masters: bool = False,
    correction: str | None = None,
    dead_after: float = 5.0,
    timeout: float = 1800.0,
) -> Pipeline:
    """A Pipeline that runs the rank files of a plan folder (`plan.save`), as they are on disk, on a model of the same make.

    loss is needed again only to compile for other input shapes or to evaluate. optimizer and what belongs to it is not in the
    folder: give a plan that updates weights the same as when it was compiled. dead_after, timeout: see compile.

    Raises PlanError, also where the model's parameters have other shapes.
    """
    plan = load_plan(Path(folder))
    _refuse_other_shapes(plan, model, str(folder))
    if (optimizer is None) != (not plan.weights):
        has = f"updates weights ({plan.weights})" if plan.weights else "does not update weights"
        raise PlanError(f"{folder}: the plan {has}: pass {'an' if plan.weights else 'no'} optimizer= to zbfx.load")
    where = place()
    distributed = where is not None and where.size > 1
    options = Options(
        len(plan.stages),
        plan.microbatches,
        len(plan.programs),
        plan.schedule,
        None,
        (),
        plan.reduction,
        _device(model, device or plan.device.type, distributed),
        training=_training(optimizer, plan.weights or "synchronous", max_norm, loss_scale, rollback, masters, correction),
        dead_after=dead_after,
        timeout=timeout,
    )
    return Pipeline(model, options, loss=loss, shared=tuple(shared), init=init, plan=replace(plan, device=options.device))


def _refuse_other_shapes(plan: Plan, model: torch.nn.Module, folder: str) -> None:
    """Raises PlanError for a model whose parameters of the same names have other shapes."""
    mine = dict(model.named_parameters(remove_duplicate=False))
    for name, shape in plan.parameter_shapes.items():
        if name in mine and tuple(mine[name].shape) != tuple(shape):
            raise PlanError(
                f"{folder}: the plan is for {name!r} of shape {list(shape)}, this model has {list(mine[name].shape)}: build the "
                "model that the plan was made for, or compile this one"
            )


def _fits(plan: Plan, batch: Batch) -> bool:
    """True if a loaded plan is for this batch's shapes and values."""
    leaves = batch.microbatch(0)
    shapes = {
        i: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)
    }
    statics = {i: repr(v) for i, v in enumerate(leaves) if not isinstance(v, torch.Tensor)}
    return shapes == dict(plan.shapes) and statics == {i: repr(v) for i, v in plan.statics.items()}


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield
