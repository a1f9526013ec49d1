"""One pass inside of the real Trainer against the loop of the guide."""

import pytest

pytest.importorskip("accelerate")

import torch
from plain_loop import M, Sentences, gpt2, llama, windows
from torch import nn
from trainer_runs import DIGITS, InOrder, arguments, assert_is_plain, logged, summed, trained
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from invariant_adam.integrations.transformers import InvariantTrainer
from invariant_adam.integrations.window import OwnLosses, OwnMeans, TokenMeans
from invariant_adam.one_pass import UnsupportedUse


@pytest.mark.parametrize(("per_device", "accumulation"), [(4 * M, 1), (2 * M, 2)])
@pytest.mark.parametrize(
    ("build", "samples", "unequal", "options"),
    [
        (llama, 58, True, {}),
        (gpt2, 58, True, {}),
        (llama, 58, True, {"compute_loss_func": summed}),
        (llama, 48, False, {}),
    ],
    ids=["llama", "gpt2", "loss function", "equal"],
)
def test_one_pass_is_the_plain_loop(tmp_path, build, samples, unequal, options, per_device, accumulation):
    data = Sentences(samples, unequal)
    trainer = trained(
        build(),
        arguments(
            tmp_path, accumulation, per_device_train_batch_size=per_device, logging_strategy="steps", logging_steps=1
        ),
        data,
        micro_batch_size=M,
        one_pass=True,
        **options,
    )
    losses = assert_is_plain(trainer, build, data, windows(range(samples), 4) * 3)
    assert logged(trainer) == pytest.approx(losses, abs=DIGITS)


def test_one_pass_with_label_smoothing(tmp_path):
    data = Sentences(58, unequal=True)
    args = arguments(tmp_path, 2, per_device_train_batch_size=2 * M, label_smoothing_factor=0.1)
    trainer = trained(llama(), args, data, micro_batch_size=M, one_pass=True)

    def smoothed(model, batch):
        labels = batch.pop("labels")
        return trainer.label_smoother(model(**batch), labels, shift_labels=True)

    assert_is_plain(trainer, llama, data, windows(range(58), 4) * 3, smoothed)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_one_pass_in_bfloat16_is_the_loop_in_bfloat16(tmp_path, build):
    """Accelerate's autocast is inside of the model, where the check of one pass would meet it in float64."""
    data, runs = Sentences(48, unequal=True), []
    for size, accumulation, one_pass in ((M, 4, False), (4 * M, 1, True)):
        args = arguments(tmp_path, accumulation, per_device_train_batch_size=size, bf16=True)
        runs.append(trained(build(), args, data, micro_batch_size=M, one_pass=one_pass))
    start = nn.utils.parameters_to_vector(build().parameters())
    loop, once = (nn.utils.parameters_to_vector(run.model.parameters()) for run in runs)
    assert (once - loop).norm() < 0.02 * (loop - start).norm()  # a bfloat16 has 8 bits
    assert "_original_forward" in vars(runs[1].model)
    assert runs[1].model.forward is not runs[1].model._original_forward  # evaluation has Accelerate's autocast back


def test_each_call_of_train_may_have_a_new_model(tmp_path):
    data = Sentences(32, unequal=True)
    args = arguments(tmp_path, 1, per_device_train_batch_size=16)
    trainer = trained(None, args, data, micro_batch_size=M, one_pass=True, model_init=llama)
    trainer.train()
    assert_is_plain(trainer, llama, data, windows(range(32), 4) * 3)


def test_evaluation_is_the_trainer_s_own(tmp_path):
    data, model = Sentences(32, unequal=True), llama()
    args = arguments(tmp_path, 1, per_device_train_batch_size=16, per_device_eval_batch_size=32, num_train_epochs=1)
    trainer = trained(model, args, data, micro_batch_size=M, one_pass=True, eval_dataset=data)
    plain = Trainer(model=model, args=args, eval_dataset=data)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)


class Meaning(InOrder, InvariantTrainer):
    """Takes a mean over all tokens by itself."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return summed(model(**inputs), labels)


def test_a_mean_over_the_tokens_of_a_mini_batch_is_refused(tmp_path):
    options = {"micro_batch_size": M, "one_pass": True, "cls": Meaning}
    args = arguments(tmp_path, 1, per_device_train_batch_size=16)
    # Whichever sees it first: what stands in for the model's loss, or the check of a loss outside of the model.
    with pytest.raises(
        (ValueError, UnsupportedUse), match=r"(numbers of tokens|weigh).*give the trainer a compute_loss"
    ):
        trained(llama(), args, Sentences(32, unequal=True), **options)
    data = Sentences(32)
    assert_is_plain(trained(llama(), args, data, **options), llama, data, windows(range(32), 4) * 3)


@pytest.mark.parametrize(
    ("loss", "shifted"), [(ForCausalLMLoss, False), (ForCausalLMLoss, True), (ForMaskedLMLoss, False)]
)
@pytest.mark.parametrize("samples", [3 * M, 3 * M + 1, M - 1])
def test_means_by_token_are_those_of_each_micro_batch(loss, samples, shifted):
    generator = torch.Generator().manual_seed(samples)
    logits = torch.randn(samples, 5, 7, dtype=torch.float32, generator=generator)
    labels = torch.randint(7, (samples, 5), generator=generator)
    labels[torch.rand(samples, 5, generator=generator) < 0.3] = -100
    labels[:, 1] = 3  # each sample has a token
    more = {"shift_labels": labels.roll(1, 1)} if shifted else {}
    found = []
    for kind in (OwnMeans, TokenMeans):
        x = logits.clone().requires_grad_()
        value = kind(loss, M)(x, labels, vocab_size=7, **more)
        value.backward()
        found.append((value.detach(), x.grad))
    assert TokenMeans.takes(loss)
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_a_loss_that_is_given_its_number_of_items_is_a_sum_of_each_micro_batch():
    logits, labels = torch.randn(2 * M, 5, 7), torch.randint(7, (2 * M, 5))
    got, want = (kind(ForCausalLMLoss, M)(logits, labels, 7, num_items_in_batch=3) for kind in (TokenMeans, OwnMeans))
    assert torch.equal(got, want)


@pytest.mark.filterwarnings("default")  # torch warns of itself while tracing
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_compiled_models_loss_is_a_graph_of_its_own_unless_one_graph_is_asked_for(build, whole):
    """In the graph of the logits, which are returned too, they would have a gradient of zeros of their size."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build()
    run = torch.compile(model, backend="aot_eager", fullgraph=whole)
    ids = torch.randint(model.config.vocab_size, (3 * M, 6))
    with OwnLosses(run, M).of(3 * M, "", ids):
        found = run(input_ids=ids, labels=ids).loss
        want = model(input_ids=ids, labels=ids).loss
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1 if whole else graphs > 1
    torch.testing.assert_close(found, want)
