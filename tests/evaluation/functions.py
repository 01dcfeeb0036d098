"""The functions of a user, which worker processes import: a small classifier and its data."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.data import TensorDataset

import limpet
from limpet.errors import Unavailable

# torchmetrics imports transformers, which takes 0.9 s. No worker uses a metric of texts.
IS_WORKER = "pytest" not in sys.modules and "transformers" not in sys.modules
if IS_WORKER:
    sys.modules["transformers"] = SimpleNamespace(AutoModel=None, AutoTokenizer=None)
try:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
finally:
    if IS_WORKER:
        del sys.modules["transformers"]

RECORDS = 1000


def make_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 3)
    )


def data():
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(RECORDS, 8, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (RECORDS,), generator=generator))


def setup(snapshot):
    model = make_model(99)
    limpet.load(snapshot.url, into={"model": model}, keys="model/**")
    return model


def setup_from_dict(state):
    assert set(state) == {"model"}
    model = make_model(99)
    model.load_state_dict(state["model"])
    return model


def evaluate(model, batch):
    inputs, labels = batch
    logits = model(inputs)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    accuracy = MulticlassAccuracy(3, average="micro")
    accuracy.update(logits, labels)
    return {"val/loss": (loss, len(labels)), "accuracy": accuracy}


KEPT = MulticlassAccuracy(3, average="macro")


def evaluate_with_one_metric(model, batch):
    KEPT.update(model(batch[0]), batch[1])
    return {"accuracy": KEPT}


def expected(state):
    """The metrics of a computation by hand, over all of the data at once."""
    model = make_model()
    model.load_state_dict(state["model"])
    model.eval()
    inputs, labels = data().tensors
    with torch.no_grad():
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits, labels)
    return {
        "val/loss": loss.item(),
        "accuracy": (logits.argmax(1) == labels).double().mean().item(),
    }


def evaluate_nan(model, batch):
    return {"loss": (float("nan"), 1)}


def evaluate_nothing(model, batch):
    return None


def evaluate_vector(model, batch):
    matrix = MulticlassConfusionMatrix(3)
    matrix.update(model(batch[0]), batch[1])
    return {"matrix": matrix}


def evaluate_raising(model, batch):
    if (batch[0] == data().tensors[0][500]).all(1).any():
        raise ZeroDivisionError("one bad shard")
    return {"loss": (0.0, 1)}


def setup_failing(snapshot):
    raise FileNotFoundError("tokenizer.json")


def _once(name):
    """True for the first call in all processes."""
    try:
        Path(os.environ["TEST_FOLDER"], name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def evaluate_dying(model, batch):
    """Two workers are killed in the middle of a task."""
    if _once("first") or _once("second"):
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(model, batch)


def evaluate_hanging(model, batch):
    """One worker never returns its task."""
    if _once("hang"):
        time.sleep(3600)
    return evaluate(model, batch)


def evaluate_and_tell(model, batch):
    """Slow; each worker prints, and leaves its process id."""
    print("a batch")
    Path(os.environ["TEST_FOLDER"], f"pid-{os.getpid()}").touch()
    return evaluate_slowly(model, batch)


def setup_that_finds_nothing(snapshot):
    """As on a machine that does not have the folder of the run."""
    raise limpet.errors.NotFound(f"{snapshot.url} has no shard")


def evaluate_poison(model, batch):
    """One shard kills each worker."""
    if (batch[0] == data().tensors[0][500]).all(1).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return {"loss": (0.0, 1)}


def evaluate_slowly(model, batch):
    time.sleep(0.05)
    return evaluate(model, batch)


def evaluate_forking(model, batch):
    """Returns in two processes."""
    if _once("fork") and os.fork():
        time.sleep(0.3)  # the other one is faster
    return evaluate(model, batch)


def data_of_any_length():
    """A worker that starts later has fewer records."""
    if _once("length"):
        return [*range(100)]
    _once("shorter")
    return [*range(90)]


def evaluate_when_two_have_the_data(model, batch):
    """Waits until another worker has called ``data_of_any_length``."""
    while not Path(os.environ["TEST_FOLDER"], "shorter").exists():
        time.sleep(0.01)
    time.sleep(0.05)  # it takes a task now
    return {"loss": (0.0, 1)}


def evaluate_naming_nonsense(model, batch):
    return {"n" * 2_000_000: (1.0, 1)}


def empty():
    return []


def setup_unavailable(snapshot):
    """The store does not answer once."""
    if _once("unavailable"):
        raise Unavailable("503")
    return setup(snapshot)


def evaluate_printing(model, batch):
    print("a batch")
    return evaluate(model, batch)


def setup_of_a_deleted_version(snapshot):
    """A person deletes the version while it is loaded."""
    shutil.rmtree(Path(snapshot.url), ignore_errors=True)
    return setup(snapshot)
