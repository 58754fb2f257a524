"""Hugging Face models, the real classes: bitwise the unsplit exported model, and exactly the bytes predicted.

Where one weight serves two stages (tied embeddings), its gradients are summed per stage first, which rounds differently.
"""

from __future__ import annotations

import pytest
import torch

import zbfx
from tests.equal import SAMPLES, exported, largest, pipe_for, step
from tests.families import FAMILIES
from tests.models import Case
from tests.reference import differences, memory_differences

# The parameters that two stages share, by class: bitwise equal everywhere else.
TIED = {
    "GPT2LMHeadModel": "transformer.wte.weight",
    "BertForMaskedLM": "bert.embeddings.word_embeddings.weight",
    "T5ForConditionalGeneration": "shared.weight",
    "MambaForCausalLM": "backbone.embeddings.weight",
    "Gemma2ForCausalLM": "model.embed_tokens.weight",
    "WhisperForConditionalGeneration": "model.decoder.embed_tokens.weight",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_one_process(name: str) -> None:
    case = FAMILIES[name]()
    wanted = exported(case, 2)
    model, pipe = pipe_for(case, 4)
    pipe.watch(times=False, memory=True)
    loss = step(case, pipe)
    tied = TIED.get(name)
    differ = [d for d in differences(model, loss, wanted) if tied is None or not d.startswith(f"{tied}.grad")]
    assert differ == []
    assert len(wanted.grads) == sum(p.grad is not None for p in model.parameters()) > 20
    assert memory_differences(pipe.plan, pipe.observed, range(4)) == []
    assert largest(model, wanted)[0] <= (0.0 if tied is None else 5e-7)


def test_hidden_states_among_the_outputs() -> None:
    """output_hidden_states returns a value of every layer beside the loss; predict gives them all back."""
    case = FAMILIES["LlamaForCausalLM"]()
    args, kwargs, _ = case.batch(2 * SAMPLES)
    model, pipe = pipe_for(case, 3)
    with_states = pipe.step(*args, **kwargs, output_hidden_states=True)
    assert torch.equal(with_states, step(case, pipe))
    more = {"attention_mask": kwargs["attention_mask"], "output_hidden_states": True}
    with pytest.raises(zbfx.TraceError, match=r"DynamicCache(?s:.*)pass use_cache=False"):
        pipe.predict(*args, **more)
    got = pipe.predict(*args, **more, use_cache=False)
    with torch.no_grad():
        wanted = model.eval()(*args, **more, use_cache=False)
    assert len(got.hidden_states) == len(wanted.hidden_states) == 3
    for a, b in zip([got.logits, *got.hidden_states], [wanted.logits, *wanted.hidden_states], strict=True):
        torch.testing.assert_close(a, b)


def test_a_loss_function_in_place_of_labels() -> None:
    case = FAMILIES["Qwen3ForCausalLM"]()
    _, kwargs, _ = case.batch(2 * SAMPLES)
    ids = kwargs["input_ids"]

    def loss(output: object, target: torch.Tensor) -> torch.Tensor:
        logits = output.logits[:, :-1]  # type: ignore[attr-defined]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)

    own = Case(case.model, loss, lambda n: ((case.batch(n)[1]["input_ids"],), {}, case.batch(n)[1]["input_ids"]))
    model, pipe = pipe_for(own, 3)
    assert differences(model, pipe.step(ids, target=ids), exported(own, 2)) == []
