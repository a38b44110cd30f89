"""The model and tokenizer that the Hugging Face examples train."""

from __future__ import annotations

import torch
from text import articles
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

VOCAB = 4096


def load(name: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """What ``from_pretrained`` finds; without a name, a small random Llama."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokenizer()


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on some of the text."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        (text for _, text in articles()[:100]), vocab_size=VOCAB, special_tokens=["<pad>", "<eos>"],
        show_progress=False,
    )  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
