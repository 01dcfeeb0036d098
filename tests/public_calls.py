"""Each public function that takes a URL, a store, or an object of Limpet, with one argument left
open: for tests of what any argument may be."""

import limpet
from limpet.preemption import FileNotice, PreemptionGuard
from limpet.sinks import JsonLines
from limpet.tasks import RemoteQueue, TaskServer


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
    "TrainingEvaluation": lambda ckpt: limpet.TrainingEvaluation(
        ckpt, {}, len, data=[1], every=limpet.EverySteps(1)
    ),
    "attach": limpet.attach,
    "register_store scheme": lambda scheme: limpet.register_store(scheme, len),
    "register_store": lambda function: limpet.register_store("own", function),
    "Checkpointer save": lambda policy: limpet.Checkpointer("r2", {"n": 1}, save=policy),
    "Checkpointer keep": lambda policy: limpet.Checkpointer("r2", {"n": 1}, keep=policy),
    "Checkpointer stop": lambda policy: limpet.Checkpointer("r2", {"n": 1}, stop=policy),
    "Checkpointer tiers": lambda tier: limpet.Checkpointer("r2", {"n": 1}, tiers=[tier]),
    "Checkpointer preemption": lambda p: limpet.Checkpointer("r2", {"n": 1}, preemption=p),
    "Preemption notices": lambda notice: limpet.Preemption(notices=[notice]),
    "group": lambda group: limpet.load("run@1", {"n": 1}, group=group),
    "Group.join": lambda address: limpet.Group.join(address, 0, 1),
    "resume": lambda at: limpet.Checkpointer("r2", {"n": 1}, quiet=True).resume(start=at),
    "resume at": lambda at: limpet.Checkpointer("r2", {"n": 1}, quiet=True).resume(at=at),
    "pin": lambda step: limpet.Run("run").pin(step),
    "unpin": lambda step: limpet.Run("run").unpin(step),
    "delete": lambda version: limpet.Run("run").delete(version),
    "find": lambda step: limpet.Run("run").find(step),
    "metrics": lambda at: limpet.Run("run").metrics(at),
    "add_metrics": lambda at: limpet.Run("run").add_metrics(at, {"a": 1}),
    "evaluations": lambda at: limpet.Run("run").evaluations(at),
    "best": lambda metric: limpet.Run("run").best(metric),
    "retain": lambda policy: limpet.Run("run").retain(policy),
    "TaskServer": TaskServer,
    "MemoryTier": lambda path: limpet.MemoryTier(every=limpet.EverySteps(1), path=path),
    "LocalTier": limpet.LocalTier,
    "FileNotice": FileNotice,
    "JsonLines": JsonLines,
}
