"""Small random models of the families that people train, and batches for them."""

import importlib

import torch

VOCAB = 97

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES = {
    "llama": ("Llama", _SMALL),
    "qwen3": ("Qwen3", {**_SMALL, "head_dim": 8}),
    "gemma2": (
        "Gemma2",
        {**_SMALL, "head_dim": 8, "final_logit_softcapping": 0.7, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("Gemma3", {**_SMALL, "head_dim": 8, "final_logit_softcapping": 0.7}),
    "mistral": ("Mistral", _SMALL),
    "phi": ("Phi", _SMALL),  # the head has a bias
    "cohere": ("Cohere", {**_SMALL, "logit_scale": 0.0625}),
    "granite": ("Granite", {**_SMALL, "logits_scaling": 6.0}),
    "gpt_oss": (
        "GptOss",
        {
            **_SMALL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
            "output_router_logits": True, "router_aux_loss_coef": 0.3,
        },
    ),
    "olmo": ("Olmo", _SMALL),
    "gpt2": (  # tied, and a vocabulary of odd size
        "GPT2",
        {
            "vocab_size": 50257, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
    ),
}  # fmt: skip
"""Name → prefix of the transformers classes, and what its config is given."""

_MODULES = {
    "gemma3": ("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2Config", "GPT2LMHeadModel"),
}


def classes(family):
    """Config class and model class; only the family's own modules are imported."""
    prefix, _ = FAMILIES[family]
    usual = (family, f"{prefix}Config", f"{prefix}ForCausalLM")
    package, config, model = _MODULES.get(family, usual)
    base = f"transformers.models.{package}"
    return (
        getattr(importlib.import_module(f"{base}.configuration_{package}"), config),
        getattr(importlib.import_module(f"{base}.modeling_{package}"), model),
    )


def make(family, **options):
    """A model with weights large enough that softmax is not flat; the same each time."""
    config, model = classes(family)
    torch.manual_seed(0)
    made = model(config(**{**FAMILIES[family][1], "attn_implementation": "eager", **options}))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
    return made


def batch(model, sequences=3, length=11):
    """Token ids, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (sequences, length), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    labels[2, -2:] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model, **inputs):
    """One forward and backward: the outputs and every parameter's gradient."""
    model.zero_grad()
    outputs = model(**inputs)
    (outputs.loss if hasattr(outputs, "loss") else outputs[0]).backward()
    return outputs, {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
