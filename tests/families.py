"""Sixteen families of Hugging Face models and two of torchvision's kind, small and random: the real classes, real code paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.equal import case
from tests.models import Case

VOCABULARY, LENGTH = 128, 12
SIZE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT: dict[str, Any] = {**SIZE, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GROUPED: dict[str, Any] = {**TEXT, "num_key_value_heads": 2}


def _ids(n: int, g: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (n, length), generator=g)


def text(n: int, g: torch.Generator) -> Any:
    """Tokens that are their own labels."""
    ids = _ids(n, g)
    return (), {"input_ids": ids, "labels": ids}, None


def padded(n: int, g: torch.Generator) -> Any:
    """The same with padding, other in every sample."""
    ids = _ids(n, g)
    lengths = torch.arange(n) % 4
    return (ids,), {"labels": ids, "attention_mask": (torch.arange(LENGTH) < LENGTH - lengths[:, None]).long()}, None


def pictures(n: int, g: torch.Generator) -> Any:
    """Pictures of 5 classes."""
    return (torch.randn(n, 3, 32, 32, generator=g),), {"labels": torch.randint(0, 5, (n,), generator=g)}, None


def pairs(n: int, g: torch.Generator) -> Any:
    """Pictures with words."""
    return (), {"input_ids": _ids(n, g), "pixel_values": torch.randn(n, 3, 32, 32, generator=g), "return_loss": True}, None


def translation(n: int, g: torch.Generator) -> Any:
    """Tokens, and fewer of another kind."""
    return (_ids(n, g),), {"labels": _ids(n, g, 7)}, None


def speech(n: int, g: torch.Generator) -> Any:
    """Mel spectra with words."""
    return (torch.randn(n, 8, 32, generator=g),), {"labels": _ids(n, g)}, None


def _of(make: Callable[[Any], nn.Module], batch: Any) -> Callable[[], Case]:
    def build() -> Case:
        import transformers

        transformers.logging.set_verbosity_error()
        return case(lambda: make(transformers), None, batch)

    return build


# The class's name -> Case. All in train mode, dropout 0 where there would be any: masks are compared elsewhere.
FAMILIES: dict[str, Callable[[], Case]] = {
    "GPT2LMHeadModel": _of(
        lambda t: t.GPT2LMHeadModel(
            t.GPT2Config(
                n_layer=2, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
            )
        ),
        padded,
    ),
    "LlamaForCausalLM": _of(lambda t: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED)), padded),
    "Qwen2ForCausalLM": _of(lambda t: t.Qwen2ForCausalLM(t.Qwen2Config(**GROUPED)), text),
    "Qwen3ForCausalLM": _of(lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(**GROUPED, head_dim=8)), text),
    "MistralForCausalLM": _of(lambda t: t.MistralForCausalLM(t.MistralConfig(**GROUPED, sliding_window=4)), text),
    "BertForMaskedLM": _of(
        lambda t: t.BertForMaskedLM(t.BertConfig(**TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)), padded
    ),
    "ViTForImageClassification": _of(
        lambda t: t.ViTForImageClassification(
            t.ViTConfig(
                **SIZE, image_size=32, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5
            )
        ),
        pictures,
    ),
    "T5ForConditionalGeneration": _of(
        lambda t: t.T5ForConditionalGeneration(
            t.T5Config(
                d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=VOCABULARY,
                dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
            )
        ),
        translation,
    ),
    "MixtralForCausalLM": _of(
        lambda t: t.MixtralForCausalLM(t.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)), text
    ),
    "MambaForCausalLM": _of(
        lambda t: t.MambaForCausalLM(
            t.MambaConfig(hidden_size=32, state_size=4, num_hidden_layers=2, vocab_size=VOCABULARY)
        ),
        text,
    ),
    "CLIPModel": _of(
        lambda t: t.CLIPModel(
            t.CLIPConfig(
                text_config={**TEXT, "max_position_embeddings": 32},
                vision_config={**SIZE, "image_size": 32, "patch_size": 8},
                projection_dim=16,
            )
        ),
        pairs,
    ),
    "ResNetForImageClassification": _of(
        lambda t: t.ResNetForImageClassification(
            t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5)
        ),
        pictures,
    ),
    "GPTNeoXForCausalLM": _of(
        lambda t: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**TEXT, hidden_dropout=0.0, attention_dropout=0.0)), text
    ),
    "Gemma2ForCausalLM": _of(lambda t: t.Gemma2ForCausalLM(t.Gemma2Config(**GROUPED, head_dim=8, sliding_window=4)), text),
    "DeepseekV3ForCausalLM": _of(
        lambda t: t.DeepseekV3ForCausalLM(
            t.DeepseekV3Config(
                **{**GROUPED, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
                n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
                v_head_dim=8, qk_nope_head_dim=4,
            )
        ),
        text,
    ),
    "WhisperForConditionalGeneration": _of(
        lambda t: t.WhisperForConditionalGeneration(
            t.WhisperConfig(
                d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCABULARY, num_mel_bins=8, max_source_positions=16,
                max_target_positions=32, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            )
        ),
        speech,
    ),
}  # fmt: skip
