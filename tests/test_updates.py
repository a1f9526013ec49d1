import pytest
import torch
from lab_runs import CPU, M, run, small_source

from invariant_adam.lab.train import make_model
from invariant_adam.lab.updates import Epoch, Optimizer, Update, accuracy, captured, loss_of


def test_the_loss_is_the_papers():
    source = small_source("vit")
    x, y = source.epoch(0, 0, 0, 80)
    model = make_model(run("vit"), source)
    inputs, target = source.inputs((x[:20], y[:20]))
    wanted = (x[:20].double() / 255 - source.mean) / source.std
    assert torch.allclose(inputs.double(), wanted, atol=1e-6)
    logits = model(inputs)
    loss = loss_of(logits, target, 0.1)
    log = logits.double().log_softmax(1)
    by_formula = -(0.9 * log[torch.arange(20), y[:20]] + 0.1 * log.mean(1)).mean()
    assert loss.item() == pytest.approx(by_formula.item(), rel=1e-5)
    assert accuracy(logits, target).item() == (logits.argmax(1) == y[:20]).double().mean().item()


def test_a_captured_update_has_made_its_first_three():
    """On a CPU nothing is captured, but the first updates are made in the same place, each prepared for its samples."""
    source = small_source("resnet-ln")
    settings = run(batch=10)
    model = make_model(settings, source)
    optimizer = Optimizer(settings, model, CPU)
    epoch = Epoch(source, settings, 80)
    epoch.begin(0)
    prepared: list[int] = []
    update = Update(settings, model, optimizer, source, epoch, "loop")
    captured(update, prepared.append, 160)
    assert prepared == [160, 170, 180]
    assert epoch.place.item() == 30
    assert optimizer.inner.samples_seen == 30


@pytest.mark.gpu
def test_one_micro_batch_is_torchs_adam_on_a_gpu():
    device = torch.device("cuda")
    source = small_source("vit", device)
    settings = run("vit", "invariant", "linear", M)
    model = make_model(settings, source)
    assert isinstance(Optimizer(settings, model, device).inner, torch.optim.Adam)
