"""GPT-2 from transformers, untied, byte-level: a target for the command line, and a training script for torchrun.

zbfx dump examples/gpt2.py:tiny --stages 4 --ranks 2 --microbatches 8
zbfx run examples/gpt2.py:tiny --ranks 2 --stages 4 --steps 20
torchrun --nproc-per-node 2 examples/gpt2.py
"""

import pydoc_data.topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, logging

import zbfx

logging.set_verbosity_error()
SEQUENCE, BATCH = 128, 16


def build(layers: int, width: int, heads: int) -> GPT2LMHeadModel:
    """The real class, with input and output embeddings of their own."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=SEQUENCE,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def batches():
    """The same random windows of the text on every rank: they all seed alike."""
    text = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode()))
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=generator)
        ids = torch.stack([text[s : s + SEQUENCE] for s in starts.tolist()])
        yield (ids,), {"labels": ids}, None


def tiny() -> zbfx.Target:
    """1.3 million parameters."""
    args, kwargs, _ = next(batches())
    return zbfx.Target(build(6, 128, 4), args, kwargs, batches=batches)


def small() -> zbfx.Target:
    """GPT-2's own size, on the meta device: `zbfx dump` needs no memory for it."""
    args, kwargs, _ = next(batches())
    with torch.device("meta"):
        return zbfx.Target(build(12, 768, 12), args, kwargs, init=lambda name, p: torch.nn.init.normal_(p, std=0.02))


def main() -> None:
    """What each process of torchrun does."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    args, kwargs, _ = next(batches())
    pipe = zbfx.compile(build(6, 128, 4), num_stages=4, example_inputs=args, example_kwargs=kwargs, microbatches=8)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)  # this rank's own parameters
    for step, (args, kwargs, _) in zip(range(20), batches(), strict=False):
        loss = pipe.step(*args, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"step {step}  loss {loss:.3f}", flush=True)
    pipe.close()


if __name__ == "__main__":
    main()
