"""Adapters on the head take part in the loss and get their gradients, or are refused."""

import pytest
import torch
from hf_models import batch, loss_and_gradients, make

from flce_tune.integrations.transformers import applied, apply

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("error:flce_tune computes the full logits")


def adapted(family="llama", **options):
    """A model with adapters that change something: LoRA's B starts at zero."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"], **options}
    model = peft.get_peft_model(make(family), peft.LoraConfig(**options))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def assert_same_training(model, patched):
    inputs = batch(model)
    expected, expected_gradients = loss_and_gradients(model, **inputs)
    with patched(model):
        outputs, gradients = loss_and_gradients(model, **inputs)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=2e-6, atol=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        scale = expected_gradients[name].abs().max().item()
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=1e-4, atol=3e-6 * scale, msg=name
        )
    torch.testing.assert_close(outputs.logits.detach(), expected.logits.detach())
    return gradients


@pytest.mark.parametrize("family", ["llama", "cohere", "gemma2"])
def test_lora_on_the_head(family):
    gradients = assert_same_training(adapted(family), applied)
    head = [name for name in gradients if "lm_head" in name]
    assert len(head) == 2  # A and B
    assert all(gradients[name].abs().max() > 0 for name in head)


def test_lora_on_the_head_with_a_bias():
    assert_same_training(adapted("phi"), applied)


def test_two_adapters_at_once():
    model = adapted()
    second = peft.LoraConfig(r=2, lora_alpha=1, target_modules=["lm_head"])
    model.add_adapter("second", second)
    model.base_model.set_adapter(["default", "second"])
    gradients = assert_same_training(model, applied)
    assert sum("lm_head" in name for name in gradients) == 4


def test_dropout_of_the_adapter():
    model = adapted(lora_dropout=0.5)
    inputs = batch(model)
    torch.manual_seed(5)
    expected, expected_gradients = loss_and_gradients(model, **inputs)
    with applied(model):
        torch.manual_seed(5)
        outputs, gradients = loss_and_gradients(model, **inputs)
    torch.testing.assert_close(outputs.loss, expected.loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6)


def test_apply_draws_no_random_numbers():
    model = adapted(lora_dropout=0.5)
    torch.manual_seed(5)
    apply(model)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert drawn == torch.rand(1)


def test_adapters_switched_off_and_merged():
    model = adapted()
    with model.disable_adapter():
        plain = model(**batch(model)).loss
    apply(model)
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch(model)).loss, plain)
    with_adapters = model(**batch(model)).loss
    assert abs(with_adapters - plain) > 0.1
    model.merge_adapter()
    torch.testing.assert_close(model(**batch(model)).loss, with_adapters)


def test_an_adapter_added_after_apply_takes_part():
    reference = adapted()
    base = apply(make("llama"))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"])
    model = peft.get_peft_model(base, config)
    model.load_state_dict(reference.state_dict())
    expected, expected_gradients = loss_and_gradients(reference, **batch(reference))
    outputs, gradients = loss_and_gradients(model, **batch(model))
    torch.testing.assert_close(outputs.loss, expected.loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6)


def test_modules_to_save_trains_the_copy():
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    gradients = assert_same_training(model, applied)
    head = [name for name in gradients if "lm_head" in name]
    assert head == ["base_model.model.lm_head.modules_to_save.default.weight"]
    assert gradients[head[0]].abs().max() > 0


def test_adapters_in_float32_on_a_bfloat16_model():
    model = peft.get_peft_model(
        make("llama").bfloat16(), peft.LoraConfig(r=4, target_modules=["lm_head"])
    )
    with torch.no_grad():
        model.base_model.model.lm_head.lora_B["default"].weight.normal_()
    inputs = batch(model)
    expected, expected_gradients = loss_and_gradients(model, **inputs)
    with applied(model):
        outputs, gradients = loss_and_gradients(model, **inputs)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-2, atol=0)
    for name, gradient in gradients.items():
        assert gradient.dtype == expected_gradients[name].dtype == torch.float32
        error = (gradient - expected_gradients[name]).norm() / expected_gradients[name].norm()
        assert error < 0.02


REFUSED = (
    r"head of LlamaForCausalLM, a peft\.tuners\.lora\.layer\.Linear with DoraLinearVariant, "
    r"cannot be left to the loss: \.T on its output cannot be recorded"
)


def test_a_variant_of_lora_is_refused_by_name():
    model = adapted(use_dora=True)
    with pytest.raises(ValueError, match=REFUSED):
        apply(model)
    model(**batch(model)).loss.backward()  # it is as it was


def test_a_variant_of_lora_added_after_apply_is_refused_when_it_would_train():
    config = peft.LoraConfig(r=4, use_dora=True, target_modules=["lm_head"])
    model = peft.get_peft_model(apply(make("llama")), config)
    with pytest.raises(ValueError, match=REFUSED):
        model(**batch(model))


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=4, lora_bias=True, target_modules=["lm_head"]),
        peft.LoraConfig(r=4, use_rslora=True, target_modules=["lm_head"]),
        peft.IA3Config(target_modules=["lm_head"], feedforward_modules=["lm_head"]),
    ],
    ids=["lora_bias", "rslora", "ia3"],
)
def test_what_changes_the_heads_input_or_adds_to_it_is_recorded(config):
    assert_same_training(peft.get_peft_model(make("phi"), config), applied)


def test_a_variant_of_lora_elsewhere_is_not_our_concern():
    assert_same_training(adapted(use_dora=True, target_modules=["q_proj"]), applied)


def test_prompt_tuning_shifts_the_labels_by_itself():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(make("llama"), config)
    assert_same_training(model, applied)
