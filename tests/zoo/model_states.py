"""Models, optimizers, and schedulers of torchvision, timm, transformers, and peft. All are tiny."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.training import Training, make_step, train

Build = Callable[[], Training]
IMAGES = (2, 3, 32, 32)


def _vision(create, shape=IMAGES):
    model = create()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), shape)


def torchvision():
    from torchvision import models
    from torchvision.models import convnext, densenet, resnet, swin_transformer, vision_transformer

    blocks = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
    small: dict[str, Callable[[], nn.Module]] = {
        "resnet": lambda: resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=3),
        "mobilenet_v2": lambda: models.mobilenet_v2(width_mult=0.1, num_classes=3),
        "squeezenet": lambda: models.squeezenet1_1(num_classes=3),
        "shufflenet": lambda: models.shufflenet_v2_x0_5(num_classes=3),
        "densenet": lambda: densenet.DenseNet(4, (1, 1, 1, 1), 8, drop_rate=0.1, num_classes=3),
        "convnext": lambda: convnext.ConvNeXt(blocks, 0.5, num_classes=3),
        "vision transformer": lambda: vision_transformer.VisionTransformer(
            32, 8, 1, 2, 8, 16, dropout=0.1, num_classes=3
        ),
        "swin transformer": lambda: swin_transformer.SwinTransformer(
            [2, 2], 8, [1, 1], [1, 2], [2, 2], stochastic_depth_prob=0.5, num_classes=3
        ),
    }
    return {name: partial(_vision, create) for name, create in small.items()}


def timm():
    from timm import create_model

    names = ("test_vit", "test_resnet", "test_efficientnet", "test_convnext", "test_nfnet")
    cases: dict[str, Build] = {
        name: partial(_vision, partial(create_model, name, num_classes=3), (2, 3, 64, 64))
        for name in names
    }
    cases["test_vit, stochastic depth"] = partial(
        _vision, partial(create_model, "test_vit", drop_path_rate=0.5), (2, 3, 160, 160)
    )
    optimizers = ("lamb", "lion", "adan", "adopt", "madgrad", "nadamw", "lookahead_adam", "laprop")
    return cases | {
        **{f"optimizer {name}": partial(_timm_optimizer, name) for name in optimizers},
        "CosineLRScheduler": _timm_scheduler,
        "ModelEmaV3": _timm_ema,
    }


def _timm_optimizer(name):
    from timm.optim import create_optimizer_v2

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return train(model, create_optimizer_v2(model, opt=name, lr=0.01, weight_decay=0.1))


def _timm_scheduler():
    from timm.scheduler import CosineLRScheduler

    training = _timm_optimizer("adamw")
    optimizer = training.state["optimizer"]
    scheduler = CosineLRScheduler(optimizer, 10, warmup_t=2, warmup_lr_init=0.001, noise_range_t=3)

    def step(i):
        loss = training.step(i)
        scheduler.step(i)
        return [loss, optimizer.param_groups[0]["lr"]]

    return Training({**training.state, "scheduler": scheduler}, step)


def _timm_ema():
    from timm.utils import ModelEmaV3

    training = _vision(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    ema = ModelEmaV3(training.state["model"], decay=0.9, use_warmup=True)

    def step(i):
        loss = training.step(i)
        ema.update(training.state["model"], step=i)
        return loss

    return Training({**training.state, "ema": ema}, step)


def _words(x):
    return x.abs().mul(10).long().clamp(max=31)


def _language(create, optimizer=None):
    model = create()
    forward = lambda x: model(input_ids=_words(x), labels=_words(x)).loss  # noqa: E731
    trained = [p for p in model.parameters() if p.requires_grad]
    return train(model, optimizer or torch.optim.AdamW(trained, lr=0.01), (2, 5), forward)


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    )
    return model


def transformers():
    import transformers as library
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    common = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    t5 = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    models: dict[str, tuple[str, str, dict[str, Any]]] = {
        "llama": ("LlamaForCausalLM", "LlamaConfig", common | heads),
        "llama, tied": (
            "LlamaForCausalLM",
            "LlamaConfig",
            common | heads | {"tie_word_embeddings": True},
        ),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", common | heads),
        "mixtral": ("MixtralForCausalLM", "MixtralConfig", common | heads | experts),
        "bert": ("BertForMaskedLM", "BertConfig", common | heads),
        "t5": ("T5ForConditionalGeneration", "T5Config", t5 | {"decoder_start_token_id": 0}),
    }
    cases: dict[str, Build] = {"gpt2": partial(_language, _gpt2)}
    for name, (model, config, options) in models.items():
        create = getattr(library, model)
        configure = getattr(library, config)
        cases[name] = partial(_language, partial(_configured, create, configure, options))
    for kind in TYPE_TO_SCHEDULER_FUNCTION:
        cases[f"scheduler {kind.value}"] = partial(_transformers_scheduler, kind.value)
    return cases | {
        "Adafactor": _transformers_adafactor,
        "TrainerState": _trainer_state,
        "config": _config,
    }


def _configured(create, configure, options):
    model: nn.Module = create(configure(**options))
    return model


def _transformers_adafactor():
    from transformers.optimization import Adafactor

    model = nn.Linear(6, 3)
    return train(model, Adafactor(model.parameters(), beta1=0.9))  # its step size is relative


def _transformers_scheduler(name):
    from transformers import get_scheduler

    options = {
        "cosine_with_min_lr": {"min_lr": 0.001},
        "cosine_warmup_with_min_lr": {"min_lr": 0.001},
        "warmup_stable_decay": {"num_decay_steps": 4},
    }
    model = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = get_scheduler(name, optimizer, 2, 10, options.get(name))
    take_step = make_step(model, optimizer)

    def step(i):
        loss = take_step(i)
        scheduler.step(*[float(loss)] * (name in ("reduce_lr_on_plateau", "greedy")))
        return [loss, optimizer.param_groups[0]["lr"]]

    return Training({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)


def _trainer_state():
    from transformers import TrainerState

    return Training({"trainer": TrainerState()}, lambda i: i)


def _config():
    from transformers import GPT2Config

    return Training({"config": GPT2Config()}, lambda i: i)


def peft():
    import peft as library

    targets: dict[str, Any] = {"target_modules": ["c_attn"]}
    tokens = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}
    configs: dict[str, Callable[[], Any]] = {
        "LoRA": lambda: library.LoraConfig(r=2, lora_dropout=0.1, **targets),
        "LoRA, modules_to_save": lambda: library.LoraConfig(
            r=2, modules_to_save=["lm_head"], **targets
        ),
        "DoRA": lambda: library.LoraConfig(r=2, use_dora=True, **targets),
        "IA3": lambda: library.IA3Config(feedforward_modules=[], **targets),
        "AdaLoRA": lambda: library.AdaLoraConfig(
            r=2, init_r=4, tinit=1, tfinal=2, deltaT=1, total_step=10, **targets
        ),
        "VeRA": lambda: library.VeraConfig(r=2, **targets),
        "prompt tuning": lambda: library.PromptTuningConfig(**tokens),
        "prefix tuning": lambda: library.PrefixTuningConfig(**tokens),
    }
    cases: dict[str, Build] = {
        name: partial(_adapted, configure) for name, configure in configs.items()
    }
    return cases | {"LoRA, only the adapter": _only_adapter}


def _adapted(configure):
    from peft import get_peft_model

    model: Any = get_peft_model(_gpt2(), configure())
    return _language(lambda: model)


def _only_adapter():
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    with torch.random.fork_rng():
        torch.manual_seed(5)  # the base model is the same in both processes, as from a file
        base: Any = _gpt2()
    model: Any = get_peft_model(base, LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"]))
    training = _language(lambda: model)
    adapter = get_peft_model_state_dict(model)
    return Training({**training.state, "model": adapter}, training.step)


GROUPS: dict[str, Callable[[], dict[str, Build]]] = {
    "torchvision": torchvision,
    "timm": timm,
    "transformers": transformers,
    "peft": peft,
}
