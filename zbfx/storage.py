"""What shares memory with what: views, dense layouts, and the bytes of a tensor's storage window."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def is_view(target: Any) -> bool:
    """True for operators whose result shares its input's storage (by schema; a few do so without saying it)."""
    if target in _SILENT_VIEWS:
        return True
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


_SILENT_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
    torch.ops.aten.unsafe_chunk.default,
}


def mutates(target: Any) -> bool:
    """True for operators that write into an argument (detach_ writes no data and does not count)."""
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable and target is not torch.ops.aten.detach_.default)


def draws(node: fx.Node) -> bool:
    """True for a call that draws from a random generator; dropout with rate 0, or not in training, draws nothing."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    for i, argument in enumerate(arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        if (argument.name in _RATES and value == 0) or (argument.name in _SWITCHES and value is False):
            return False
    return True


_RATES = {"p", "dropout", "dropout_p"}
_SWITCHES = {"train", "training"}


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill the storage window without holes or overlaps, in some order of the dimensions."""
    expected = 1
    if tensor.numel() == 0:
        return True
    for stride, size in sorted((st, s) for s, st in zip(tensor.shape, tensor.stride(), strict=True) if s > 1):
        if stride != expected:
            return False
        expected = stride * size
    return True


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage that a (fake) tensor keeps alive."""
    return tensor.untyped_storage().nbytes()


# Losses that are reduced inside the buffer of their elementwise values: the scalar keeps the whole buffer alive.
_REDUCED_IN_PLACE = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
}

# Out-of-place writes that keep the strides of a view with holes, by copying all that it looks into.
_KEEPS_HOLES = {
    torch.ops.aten.copy.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
}


def allocated(node: fx.Node, value: torch.Tensor, index: int = 0) -> int:
    """Bytes of the storage that a call allocates for its result (of several: number `index`), as kernels do it.

    Shape functions do not tell. value: the result as they give it.
    """
    if node.target in _BAGS:
        return nbytes(value) + _bag_extra(node, index) * value.element_size()
    if node.target is torch.ops.aten.mkldnn_rnn_layer.default and index == _WORKSPACE:
        return _workspace(node)
    source = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
    if isinstance(source, torch.Tensor):
        if node.target in _REDUCED_IN_PLACE and value.dim() == 0:
            return source.numel() * value.element_size()
        if node.target in _KEEPS_HOLES and not is_dense(source):
            return source.untyped_storage().nbytes()
    return nbytes(value)


_BAGS = {torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default}
_OFFSET2BAG, _BAG_SIZE = 1, 2  # results of an embedding bag
_MODE, _INCLUDE_LAST_OFFSET = 4, 7  # its arguments
_ASKED = 1 << 30
_WORKSPACE = 3  # of a recurrent layer's results, what its backward reads


def _bag_extra(node: fx.Node, index: int) -> int:
    """Elements that the CPU kernel makes room for beyond a result's own: it counts one further than it tells."""
    mode = node.args[_MODE] if len(node.args) > _MODE else 0
    last = len(node.args) > _INCLUDE_LAST_OFFSET and bool(node.args[_INCLUDE_LAST_OFFSET])
    return int((index == _OFFSET2BAG and mode != 0) or (index == _BAG_SIZE and last))


def _workspace(node: fx.Node) -> int:
    """Bytes of a recurrent layer's workspace, whose layout is oneDNN's own: the kernel itself is asked, on zeros.

    Not for layers whose arguments take more than _ASKED bytes, which would have to be there: their workspace counts 0.
    """
    if sum(n.meta["val"].nbytes for n in node.all_input_nodes) > _ASKED:
        return 0
    args = fx.map_arg(node.args, lambda n: torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype))
    with torch.enable_grad():  # without, the kernel makes none
        return nbytes(node.target(*args)[_WORKSPACE])  # type: ignore[operator]
