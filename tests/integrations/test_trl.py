"""The mixin on TRL's SFTTrainer, with PEFT's LoRA, against the loop of the guide."""

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from plain_loop import TUNED, VOCABULARY, M, Sentences, assert_equal_runs, llama, optimizer_of, train_plainly, windows
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trainer_runs import InOrder, arguments, assert_is_plain, trained
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import invariant_adam as ia
from invariant_adam.integrations.transformers import InvariantAdamMixin, InvariantTrainer

pytestmark = pytest.mark.slow  # peft and trl are installed for the slow tests alone


class InvariantSFTTrainer(InvariantAdamMixin, InOrder, SFTTrainer):
    pass


class Collated:
    """Rows of a trainer as batches, made by its own collator."""

    def __init__(self, trainer):
        self.rows, self.collate = trainer.train_dataset, trainer.data_collator

    def batch(self, indices):
        return self.collate([self.rows[i] for i in indices])


def sft(tmp_path, accumulation, **changed):
    """Return a trainer of 58 sentences of different lengths."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")), pad_token="w0")
    tokenizer.eos_token = "w2"
    data = Sentences(58, unequal=True)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(data.ids, data.mask, strict=True)]
    options = arguments(tmp_path, accumulation).to_dict()
    kept = {name for name in SFTConfig.__dataclass_fields__ if name in options}
    names = {"output_dir", "report_to", "disable_tqdm", "use_cpu", "dataloader_pin_memory", "num_train_epochs"}
    names |= {"learning_rate", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "lr_scheduler_type"}
    names |= {"logging_strategy", "save_strategy", "per_device_train_batch_size", "gradient_accumulation_steps"}
    args = SFTConfig(**{name: options[name] for name in names & kept} | {"bf16": False, "max_length": None} | changed)
    mine = {"one_pass": True, "micro_batch_size": M} if args.per_device_train_batch_size > M else {}
    return InvariantSFTTrainer(
        model=llama(),
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
        tuned_batch_size=TUNED,
        **mine,
    )


def own_mean(model, batch):
    return model(**batch).loss


@pytest.mark.parametrize(
    "changed",
    [{}, {"padding_free": True}, {"packing": True, "max_length": 16}],
    ids=["padded", "padding-free", "packed"],
)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_sft_is_the_plain_loop(tmp_path, accumulation, changed):
    trainer = sft(tmp_path, accumulation, **changed)
    trainer.train()
    data = Collated(trainer)
    rows = len(trainer.train_dataset)  # a packed row is a sample
    assert rows == 58 or changed.get("packing")
    assert_is_plain(trainer, llama, data, windows(range(rows), accumulation) * 3, own_mean)


def test_one_pass_of_the_fused_head_is_refused_by_name(tmp_path):
    with pytest.raises(ia.UnsupportedUse, match=r"(?s)ChunkedLogProb.*set one_pass=False"):
        sft(tmp_path, 1, per_device_train_batch_size=4 * M).train()


def lora():
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights="gaussian")
    return get_peft_model(llama(), config)


@pytest.mark.parametrize("one_pass", [False, True])
def test_adapters_are_trained_and_nothing_else_has_state(tmp_path, one_pass):
    data = Sentences(58, unequal=True)
    options = {"micro_batch_size": M, "one_pass": True} if one_pass else {}
    args = arguments(tmp_path, 1 if one_pass else 4, per_device_train_batch_size=4 * M if one_pass else M)
    trainer = trained(lora(), args, data, type("Ordered", (InOrder, InvariantTrainer), {}), **options)
    model = lora()
    opt = optimizer_of(model)
    train_plainly(model, opt, data, windows(range(58), 4) * 3)
    assert_equal_runs(trainer.model, trainer.invariant_adam, model, opt)
    numbers = sum(state["exp_avg"].numel() for state in trainer.invariant_adam.state.values())
    assert numbers == sum(p.numel() for p in model.parameters() if p.requires_grad) == 128
