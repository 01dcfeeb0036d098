"""Trainings of the ``Trainer`` of Transformers, and of TRL, for ``test_transformers.py``."""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils import data
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

import limpet
from limpet.integrations import frameworks
from limpet.integrations.transformers import attach
from tests.frameworks.harness import reach

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}
WORDS = 6


def make_model():
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=2))


class Sentences(data.Dataset):
    """``noise``: two words are random, from the generators of PyTorch and NumPy."""

    def __init__(self, length, noise=False):
        self.length, self.noise = length, noise

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        words = (torch.arange(WORDS) * 7 + i * 5) % 32
        if self.noise:
            words[0], words[1] = torch.randint(32, ()), int(np.random.randint(32))
        return {"input_ids": words, "labels": i % 2}


class Marks(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        reach(f"evaluation {state.global_step}")


def make_args(run, kind=TrainingArguments, **options):
    defaults = {
        "output_dir": f"{run}.trainer",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 3,
        "save_steps": 2,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
    }
    return kind(**defaults | options)


def make_trainer(
    run, *, cls=Trainer, kind=TrainingArguments, patience=None, objects=None, **options
):
    """``objects``: arguments of the Trainer. ``options``: those of its ``TrainingArguments``."""
    given = {
        "model": make_model(),
        "train_dataset": Sentences(29),
        "eval_dataset": Sentences(8, noise=True),
        "callbacks": [Marks()],
        **(objects or {}),
    }
    if patience is not None:
        given["callbacks"] = [EarlyStoppingCallback(patience), *given["callbacks"]]
    trainer = cls(args=make_args(run, kind, **options), **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(run, *, limpet_options=None, scaler=None, **options):
    trainer = attach(make_trainer(run, **options), run, **(limpet_options or {}))
    if scaler is not None:  # that of float16, which Accelerate does not make on a CPU
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", **scaler)
    output = trainer.train()
    print(f"trained to {output.global_step}: {output.training_loss}")
    assert not [*Path(f"{run}.trainer").glob("checkpoint*")]
    return trainer


def train_augmented(run, **options):
    train(run, objects={"train_dataset": Sentences(29, noise=True)}, **options)


class Stream(data.IterableDataset):
    def __iter__(self):
        for i in range(11):
            yield {"input_ids": torch.randint(32, (WORDS,)), "labels": i % 2}


def train_stream(run, **options):
    train(run, objects={"train_dataset": Stream()}, **options)


def train_shuffled_stream(run, **options):
    """A stream of Hugging Face, whose state lacks the content of its shuffle buffer."""
    from datasets import Dataset

    samples = [{"input_ids": [i % 32] * WORDS, "labels": i % 2} for i in range(40)]
    stream = Dataset.from_list(samples).to_iterable_dataset(num_shards=2)
    train(run, objects={"train_dataset": stream.shuffle(seed=3, buffer_size=8)}, **options)


def train_lengths(run, **options):
    """Sentences of different lengths."""
    texts = [{"input_ids": [i] * (1 + i * i % 5), "labels": i % 2} for i in range(30)]

    def pad(samples):
        longest = max(len(sample["input_ids"]) for sample in samples)
        words = [s["input_ids"] + [0] * (longest - len(s["input_ids"])) for s in samples]
        labels = [sample["labels"] for sample in samples]
        return {"input_ids": torch.tensor(words), "labels": torch.tensor(labels)}

    train(run, objects={"train_dataset": texts, "data_collator": pad}, **options)


class OwnOrder(data.Sampler):
    def __iter__(self):
        return iter(torch.randperm(13).tolist())

    def __len__(self):
        return 13


class TrainerWithOwnOrder(Trainer):
    def _get_train_sampler(self, *args):
        return OwnOrder()


def train_in_own_order(run, **options):
    objects = {"train_dataset": Sentences(13, noise=True)}
    train(run, cls=TrainerWithOwnOrder, objects=objects, **options)


class ShortEpochs(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 5 == 0


def train_short_epochs(run, **options):
    train(run, objects={"callbacks": [ShortEpochs()]}, **options)


def train_lora(run, **options):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["query"], lora_dropout=0.1)
    train(run, objects={"model": get_peft_model(make_model(), config)}, **options)


def train_seq2seq(run, **options):
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2}
    config = T5Config(**sizes, num_heads=2, decoder_start_token_id=0)
    pairs = [{"input_ids": [i % 32] * 5, "labels": [(i * 3) % 32] * 4} for i in range(14)]
    objects = {
        "model": T5ForConditionalGeneration(config),
        "train_dataset": pairs,
        "eval_dataset": pairs[:4],
    }
    options |= {"cls": Seq2SeqTrainer, "kind": Seq2SeqTrainingArguments}
    train(run, objects=objects, predict_with_generate=True, **options)


def train_sft(run, lora=False, **options):
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    letters = "abcdefghij"
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    config = LlamaConfig(**SIZES, attention_dropout=0.1, pad_token_id=0, eos_token_id=1)
    texts = [" ".join(letters[(i * 3 + k) % 10] for k in range(3 + i % 4)) for i in range(20)]
    objects = {
        "model": LlamaForCausalLM(config),
        "train_dataset": Dataset.from_dict({"text": texts}),
        "eval_dataset": Dataset.from_dict({"text": texts[:4]}),
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
        "peft_config": LoraConfig(r=2, target_modules=["q_proj"]) if lora else None,
    }
    defaults = {"max_length": 16, "bf16": False, "gradient_checkpointing": False}
    options = {**defaults, "per_device_train_batch_size": 2, **options}
    train(run, cls=SFTTrainer, kind=SFTConfig, objects=objects, **options)


class CountOfSteps(TrainerCallback, ExportableState):
    """Its state is an argument, as in ``TrainerControl`` of Transformers."""

    def __init__(self, count=0):
        self.count = count

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

    def state(self):
        return {"args": {"count": self.count}, "attributes": {}}


def train_counted(run, *, counts=(0, 100), **options):
    callbacks = [CountOfSteps(count) for count in counts]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(run, objects={"callbacks": callbacks}, **options)
    print("counts", *[callback.count for callback in callbacks])
    print(*[f"warning: {w.message}" for w in caught], sep="\n")


def train_stopped(run):
    """``stop=`` of the Checkpointer ends the training."""
    stop = limpet.StopWhen("eval_loss", patience=2)
    options = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.2}
    train(run, limpet_options={"stop": stop}, num_train_epochs=9, **options)


class Raise(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise ValueError("on purpose")


def train_until_an_exception(run):
    try:
        train(
            run,
            objects={"callbacks": [Raise()]},
            limpet_options={"save": limpet.OnException()},
            gradient_accumulation_steps=3,
        )
    except ValueError as e:
        print(e)


def train_longer(run, steps):
    """Train until each number of steps, in one process, with one trainer."""
    trainer = attach(make_trainer(run, lr_scheduler_type="constant"), run)
    for count in steps:
        trainer.args.max_steps = count
        assert trainer.train().global_step == count


def train_best(run):
    """The best version is not the last one. Its weights are loaded, exported, and read again."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.1}
    trainer = train(run, load_best_model_at_end=True, save_total_limit=1, **options)
    best = limpet.Run(str(run)).best("eval_loss")
    assert best.step != trainer.state.global_step
    assert (best.step, best.metadata["metrics"]["eval_loss"]) == (
        trainer.state.best_global_step,
        trainer.state.best_metric,
    )
    saved = best.load(keys="model")["model"]
    assert len(saved) > 30
    weights = trainer.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
    folder = f"{run}.exported"
    limpet.export(f"{run}@best", folder, to="hf")
    trainer.model.config.save_pretrained(folder)
    read = BertForSequenceClassification.from_pretrained(folder).state_dict()
    assert all(torch.equal(weights[name], read[name]) for name in weights)


def train_with_other_size(run, **options):
    try:
        train(run, **options)
    except limpet.errors.LimpetError as e:
        print(e)


def refuse(run):
    """Print the error of each trainer that is refused."""
    from accelerate.utils import DistributedType

    def show(name, make):
        try:
            make()
            print(f"{name}: nothing")
        except limpet.errors.LimpetError as e:
            print(f"{name}: {e}")

    trainer = make_trainer(run)
    state = trainer.accelerator.state
    for engine in ("DEEPSPEED", "MEGATRON_LM", "XLA", "FSDP"):
        state.distributed_type = DistributedType(engine)
        state.fsdp_plugin = SimpleNamespace(fsdp_version=1)
        show(engine, lambda: attach(trainer, run))
    state.distributed_type, state.fsdp_plugin = DistributedType.NO, None
    for name in ("auto_find_batch_size", "enable_jit_checkpoint", "ignore_data_skip"):
        setattr(trainer.args, name, True)
        show(name, lambda: attach(trainer, run))
        setattr(trainer.args, name, False)
    show("option", lambda: attach(trainer, run, every=3))
    show("resume", lambda: attach(trainer, run, resume={"from": 3}))
    show("object", lambda: attach("trainer", run))
    attach(trainer, run)
    show("twice", lambda: attach(trainer, run))
    show("checkpoint", lambda: trainer.train(resume_from_checkpoint=True))
    search = {"direction": "minimize", "hp_space": lambda _: {}, "n_trials": 1}
    trainer.hp_search_backend = "optuna"  # as hyperparameter_search() does
    show("search", lambda: trainer.train(trial=search))
    assert not os.path.exists(run)

    other = make_trainer(run, output_dir=str(run), save_strategy="no")
    frameworks.version = lambda _: "6.1.0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach(other, run)
    print(*[f"warning: {w.message}" for w in caught], sep="\n")
