"""The models that tests share: five of different kinds, each tiny, in train mode, without dropout, input and output untied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH = 128, 32, 12
SMALL = {"vocab_size": VOCABULARY, "tie_word_embeddings": False}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its loss, and batches for it. batch(n): (args, kwargs, target) of n samples, the same for the same n."""

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor] | None
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any], Any]]

    def fresh(self) -> nn.Module:
        """A copy with the same values, without gradients."""
        model = copy.deepcopy(self.model)
        model.zero_grad(set_to_none=True)
        return model


def gpt2(layers: int = 2) -> Case:
    transformers = _transformers()
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=WIDTH, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, **SMALL,
    )  # fmt: skip
    return _case(lambda: transformers.GPT2LMHeadModel(config), None, _tokens)


def llama(layers: int = 2) -> Case:
    transformers = _transformers()
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, **SMALL
    )
    return _case(lambda: transformers.LlamaForCausalLM(config), None, _tokens)


def bert(layers: int = 2) -> Case:
    transformers = _transformers()
    config = transformers.BertConfig(
        hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **SMALL,
    )  # fmt: skip
    return _case(lambda: transformers.BertForMaskedLM(config), None, _tokens)


def mlp(layers: int = 6) -> Case:
    def build() -> nn.Module:
        middle = [part for _ in range(layers - 2) for part in (nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU())]
        return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), *middle, nn.Linear(24, 4))

    def batch(n: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        g = torch.Generator().manual_seed(n)
        return (torch.randn(n, 16, generator=g),), {}, torch.randn(n, 4, generator=g)

    return _case(build, nn.functional.mse_loss, batch)


def cnn() -> Case:
    """Convolutions, batch norm (whose statistics change in training), group norm, ReLU in place and out of place, pooling."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 10),
        )

    def batch(n: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        g = torch.Generator().manual_seed(n)
        return (torch.randn(n, 3, 8, 8, generator=g),), {}, torch.randint(0, 10, (n,), generator=g)

    return _case(build, nn.functional.cross_entropy, batch)


MODELS: dict[str, Callable[[], Case]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "mlp": mlp, "cnn": cnn}


def _transformers() -> Any:
    """Imported where it is used: it is slow to import, and processes of tests often do without."""
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def _case(build: Callable[[], nn.Module], loss: Any, batch: Any) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Case(build().train(), loss, batch)


def _tokens(n: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    ids = torch.randint(0, VOCABULARY, (n, LENGTH), generator=torch.Generator().manual_seed(n))
    return (), {"input_ids": ids, "labels": ids}, None
