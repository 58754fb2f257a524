"""The demo's model and text: transformers' GPT-2, small, and the help topics that ship with Python, a token per byte."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zbfx.errors import InputError

SEQUENCE = 128  # bytes of text per sample
WIDTH, HEADS = 128, 4


def build_model(layers: int) -> torch.nn.Module:
    """The real GPT2LMHeadModel with random weights, one token per byte; the same on every call.

    Input and output embeddings are untied: tied ones lie on two ranks, and the sum of their gradients rounds otherwise than one
    process does. Dropout is off: eager torch would draw other masks, and there would be nothing to compare bit for bit.
    """
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, logging
    except ImportError as error:
        raise InputError("the demo's model is from transformers: pip install 'zbfx[hf]'") from error
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=SEQUENCE,
        n_layer=layers,
        n_embd=WIDTH,
        n_head=HEADS,
        initializer_range=0.08,  # for so narrow a model; the default, 0.02, makes it slow to start
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def read_text() -> torch.Tensor:
    """The bytes of Python's own help topics, i64."""
    from pydoc_data.topics import topics

    return torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))


def batches(samples: int) -> Iterator[torch.Tensor]:
    """Random windows of the text, i64[samples, SEQUENCE]; the same on every rank."""
    text, generator = read_text(), torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - SEQUENCE, (samples,), generator=generator)
        yield torch.stack([text[s : s + SEQUENCE] for s in starts.tolist()])
