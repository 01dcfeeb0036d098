"""Each public function that takes a URL, a store, or an object of Limpet, with one argument left
open: for tests of what any argument may be."""

import limpet
from limpet.preemption import PreemptionGuard
from limpet.tasks import RemoteQueue


def _checkpoint(url, **options):
    with limpet.Checkpointer(url, {"n": 1}, quiet=True, **options) as ckpt:
        ckpt.save()


def _evaluate(url):
    return limpet.Evaluation(url, dict, lambda state, data: {"m": 1}, data=[1], workers=0).run()


URL_CALLS = {
    "open": limpet.open,
    "load": limpet.load,
    "load into": lambda url: limpet.load(url, into={"n": 0}),
    "save": lambda url: limpet.save(url, {"n": 1}),
    "save_async": lambda url: limpet.save_async(url, {"n": 1}).wait(),
    "open_store": lambda url: list(limpet.open_store(url).list("")),
    "Run": lambda url: limpet.Run(url).latest(),
    "Run.pin": lambda url: limpet.Run(url).pin(1),
    "Checkpointer": _checkpoint,
    "Evaluation": _evaluate,
    "import to": lambda url: limpet.import_checkpoint("step_7.pt", url),
    "import from": lambda url: limpet.import_checkpoint(url, "imported"),
    "export from": lambda url: limpet.export(url, "exported", to="safetensors"),
    "export to": lambda url: limpet.export("run@1", url, to="safetensors"),
    "RemoteQueue": RemoteQueue.connect,
}

OBJECT_CALLS = {
    **URL_CALLS,
    "PreemptionGuard": PreemptionGuard,
    "TrainingEvaluation": lambda ckpt: limpet.TrainingEvaluation(ckpt, lambda data: {}, data=[1]),
    "attach": limpet.attach,
    "Checkpointer save": lambda policy: limpet.Checkpointer("r2", {"n": 1}, save=policy),
    "Checkpointer keep": lambda policy: limpet.Checkpointer("r2", {"n": 1}, keep=policy),
    "Checkpointer tiers": lambda tier: limpet.Checkpointer("r2", {"n": 1}, tiers=[tier]),
    "group": lambda group: limpet.save("r3", {"n": 1}, group=group),
}
