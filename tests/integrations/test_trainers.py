"""Hugging Face's Trainer and TRL's SFTTrainer train the same with the patch as without."""

import json

import pytest
import torch
from hf_models import VOCAB, batch, make

from flce_tune.integrations import deferred
from flce_tune.integrations import trl as sft
from flce_tune.integrations.transformers import apply, undo

pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.filterwarnings("error:flce_tune computes the full logits"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture
def calls(monkeypatch):
    """The options of each call of the op."""
    seen = []
    op = deferred.linear_cross_entropy

    def spy(*args, **options):
        seen.append(options)
        return op(*args, **options)

    monkeypatch.setattr(deferred, "linear_cross_entropy", spy)
    return seen


def examples(count=12, length=9):
    """Sequences with as many ignored labels as their number says: uneven micro-batches."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(count):
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        labels = ids.clone()
        labels[: index % 6] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def arguments(folder, kind=None, **options):
    from transformers import TrainingArguments

    settings = {
        "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none",
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "seed": 0,
        "lr_scheduler_type": "constant", "optim": "sgd",
    }  # fmt: skip
    return (kind or TrainingArguments)(output_dir=str(folder), **{**settings, **options})


def trained(model, folder, **options):
    """Losses, gradient norms and weights after a short training."""
    from transformers import Trainer

    trainer = Trainer(model, arguments(folder, **options), train_dataset=examples())
    trainer.train()
    history = [row for row in trainer.state.log_history if "grad_norm" in row]
    return (
        [row["loss"] for row in history],
        [float(row["grad_norm"]) for row in history],
        model.lm_head.weight.detach().clone(),
    )


def assert_same_run(first, second):
    for ours, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(
            torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-4, atol=1e-5
        )


def test_trainer_whatever_the_micro_batches(tmp_path, calls):
    """One step of 6 sequences, in uneven micro-batches of 6, 3 and 1."""
    whole = {"per_device_train_batch_size": 6}
    expected = trained(make("llama"), tmp_path, **whole)
    assert not calls
    for size in (6, 3, 1):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 6 // size}
        assert_same_run(trained(apply(make("llama")), tmp_path, **options), expected)
    assert len(calls) == 2 * (1 + 2 + 6)
    assert all(options["divisor"] is not None for options in calls)


def test_trainer_compiled(tmp_path, calls):
    options = {"per_device_train_batch_size": 6, "max_steps": 1}
    expected = trained(make("gemma2", num_hidden_layers=1), tmp_path, **options)
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    model = apply(make("gemma2", num_hidden_layers=1))
    assert_same_run(trained(model, tmp_path, **options, **compiled), expected)
    assert calls


def test_evaluation_of_the_loss_alone_computes_no_logits(tmp_path, monkeypatch):
    from transformers import Trainer

    model = make("llama")
    options = arguments(tmp_path, prediction_loss_only=True)
    trainer = Trainer(model, options, eval_dataset=examples())
    expected = trainer.evaluate()["eval_loss"]
    apply(model)
    with monkeypatch.context() as patching:
        patching.setattr(deferred.DeferredLogits, "compute", None)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_evaluation_with_metrics_gets_the_logits(tmp_path):
    from transformers import Trainer

    def metrics(prediction):
        hits = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
        return {"shape": list(prediction.predictions.shape), "hits": int(hits.sum())}

    model = make("llama")
    trainer = Trainer(model, arguments(tmp_path), eval_dataset=examples(), compute_metrics=metrics)
    expected = trainer.evaluate()
    apply(model)
    found = trainer.evaluate()
    assert found["eval_shape"] == expected["eval_shape"] == [12, 9, VOCAB]
    assert found["eval_hits"] == expected["eval_hits"]


def test_accelerate_in_mixed_precision_casts_no_logits(calls):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # one process has one precision
    model = apply(make("llama"))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    outputs = prepared(**batch(model))
    accelerator.backward(outputs.loss)
    assert outputs.logits.dtype == torch.float32
    assert not outputs.logits._computed
    assert model.lm_head.weight.grad.abs().max() > 0
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    unwrapped(**batch(model))
    assert len(calls) == 2
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_saved_model_is_that_of_transformers(tmp_path):
    model = apply(make("llama"))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again(**batch(model)).loss, model(**batch(model)).loss)


# TRL


def tokenizer():
    """Words are numbers: "17" is token 17."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2")


def sft_trainer(model, folder, **options):
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    datasets.disable_progress_bars()
    texts = [
        {
            "prompt": f"{i} {i + 1}",
            "completion": " ".join(str(3 + i * j % 90) for j in range(2 + i)),
        }
        for i in range(3, 15)
    ]
    settings = arguments(
        folder, trl.SFTConfig, per_device_train_batch_size=4, bf16=False, **options
    )
    return trl.SFTTrainer(
        model, settings, train_dataset=datasets.Dataset.from_list(texts),
        eval_dataset=datasets.Dataset.from_list(texts[:3]), processing_class=tokenizer(),
    )  # fmt: skip


LOGGED = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")


@pytest.mark.parametrize("options", [{}, {"loss_type": "dft"}], ids=["nll", "dft"])
def test_sft_trainer(tmp_path, calls, options):
    runs = []
    for patch in (lambda trainer: trainer, sft.apply):
        trainer = patch(sft_trainer(make("gemma2"), tmp_path, **options))
        trainer.train()
        trainer.evaluate()
        history = trainer.state.log_history
        steps = [[float(row[name]) for name in LOGGED] for row in history if "grad_norm" in row]
        runs.append((steps, [row["eval_loss"] for row in history if "eval_loss" in row]))
        assert bool(calls) == (patch is sft.apply)
    assert_same_run(runs[1], runs[0])
    assert all(call["reduction"] == "none" for call in calls)


def test_sft_trainer_of_a_mixture_of_experts_with_adapters(tmp_path, calls):
    peft = pytest.importorskip("peft")

    runs = []
    for patch in (lambda trainer: trainer, sft.apply):
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = peft.get_peft_model(make("gpt_oss"), config)
        trainer = patch(sft_trainer(model, tmp_path))
        trainer.train()
        history = [row for row in trainer.state.log_history if "grad_norm" in row]
        runs.append([[float(row[name]) for name in (*LOGGED, "aux_loss")] for row in history])
    assert calls
    assert_same_run([runs[1]], [runs[0]])


def test_sft_trainer_after_undo_is_its_own(tmp_path, calls):
    trainer = sft.apply(sft_trainer(make("llama"), tmp_path))
    undo(trainer.model)
    trainer.train()
    assert not calls


def test_another_trainer_is_refused(tmp_path):
    from transformers import Trainer

    trainer = Trainer(make("llama"), arguments(tmp_path))
    with pytest.raises(TypeError, match=r"takes a trl\.SFTTrainer, got Trainer"):
        sft.apply(trainer)
