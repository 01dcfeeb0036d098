"""What Python prints when a public call fails: the user's line, and at most three frames of
Limpet in the whole chain. The user's own frames are all there."""

import dataclasses
import inspect
import pickle
import pydoc
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

import limpet
from limpet.preemption import FileNotice, PreemptionGuard
from limpet.storage.memory import MemoryStore
from limpet.tasks import Queue, RemoteQueue, TaskBatches, TaskServer
from tests.fakegroup import FakeGroup

PACKAGE = str(Path(limpet.__file__).parent)


class Broken:
    """A member with code of its own, which fails below other frames of the user."""

    def state_dict(self):
        return self.own_helper()

    def own_helper(self):
        return {}["own"]

    def load_state_dict(self, state):
        self.own_helper()


class OwnStore(MemoryStore):
    """A store of the user that fails in its own code."""

    def list(self, *args, **options):
        return self.own_request()

    def get(self, *args, **options):
        return self.own_request()

    get_range = size = stat = get

    def own_request(self):
        raise self.own_error

    own_error = limpet.errors.Denied("The user's server says no")


def checkpointer(run="run", state=None, **options):
    options = {"quiet": True, **options}
    options.setdefault("preemption", None)  # nobody closes it, and its threads would remain
    return limpet.Checkpointer(run, {"n": 1} if state is None else state, **options)


def at_epochs():
    for _ in checkpointer(state={"m": 1}).epochs(2):
        pass


def at_steps():
    for _ in checkpointer("new").steps(2):
        pass


def failing_member():
    limpet.save("new/version_1", {"member": Broken()})


def failing_load_of_member():
    limpet.load("run@1", into={"n": Broken()})


def damaged():
    for file in Path("run/version_1").glob("*.safetensors"):
        file.write_bytes(b"x" * file.stat().st_size)
    limpet.load("run@1")


def writer():
    with limpet.Run("run").writer() as writing:
        writing.save({"n": 2}, step=0)


def job_error():
    queue = Queue()
    queue.job("absent").results()


FAILING = {
    "save": lambda: limpet.save("run/version_1", {"n": 1}),
    "save unsupported": lambda: limpet.save("new/version_1", {"n": {"a": [object()]}}),
    "save step": lambda: limpet.save("new/x", {"n": 1}, step=-1),
    "save member": failing_member,
    "save group": lambda: limpet.save("new/version_1", {"n": 1}, group="all"),
    "save_async": lambda: limpet.save_async("run/version_1", {"n": 1}),
    "save_async wait": lambda: limpet.save_async("/proc/none/version_1", {"n": 1}).wait(),
    "load absent": lambda: limpet.load("absent"),
    "load address": lambda: limpet.load("run@7"),
    "load differs": lambda: limpet.load("run@1", into={"m": 1}),
    "load shape": lambda: limpet.load("run@1", into={"n": 1, "w": torch.ones(3)}),
    "load key": lambda: limpet.load("run@1", keys="absent/**"),
    "load damaged": damaged,
    "load member": failing_load_of_member,
    "load own store": lambda: limpet.load(OwnStore("own")),
    "open": lambda: limpet.open("run@best"),
    "open_store": lambda: limpet.open_store("ftp://host/x"),
    "export": lambda: limpet.export("absent", "to", to="safetensors"),
    "export kind": lambda: limpet.export("run@1", "to", to="onnx"),
    "import": lambda: limpet.import_checkpoint("absent.pt", "imported"),
    "Checkpointer": lambda: checkpointer("run/version_1"),
    "Checkpointer state": lambda: checkpointer(state=[1]),
    "Checkpointer option": lambda: checkpointer(on_error="no"),
    "resume": lambda: checkpointer(state={"m": 1}).resume(),
    "resume at": lambda: checkpointer().resume(at=9),
    "resume start": lambda: checkpointer("new").resume(start="absent@1"),
    "resume twice": lambda: checkpointer("new").resume(at="x"),
    "resume own store": lambda: checkpointer(OwnStore("own")).resume(),
    "epochs": at_epochs,
    "epochs count": lambda: checkpointer().epochs(-1),
    "steps": at_steps,
    "step": lambda: checkpointer().step(),
    "step metrics": lambda: checkpointer("new").step({"a": "b"}),
    "ckpt.save": lambda: checkpointer().save(),
    "ckpt.metrics": lambda: checkpointer().metrics({1: 2}),
    "end_epoch": lambda: checkpointer().end_epoch(),
    "Run": lambda: limpet.Run(3),
    "Run.find": lambda: limpet.Run("run").find(9),
    "Run.pin": lambda: limpet.Run("run").pin(9),
    "Run.best": lambda: limpet.Run("run").best("val", "up"),
    "Run.delete": lambda: limpet.Run("run").delete("x"),
    "Run.add_metrics": lambda: limpet.Run("run").add_metrics(9, {"a": 1}),
    "Run.metrics": lambda: limpet.Run("run").metrics(9),
    "Run.retain": lambda: limpet.Run("run").retain(3),
    "open own store": lambda: limpet.open(OwnStore("own")),
    "writer": writer,
    "Evaluation": lambda: limpet.Evaluation("run", dict, len, data=[1], workers=-1),
    "TrainingEvaluation": lambda: limpet.TrainingEvaluation(3, {}, len, data=[1], every=3),
    "PreemptionGuard": lambda: PreemptionGuard(3),
    "Group.join": lambda: limpet.Group.join("nowhere", 0, 2),
    "Queue": lambda: Queue(attempts=0),
    "Queue job": job_error,
    "RemoteQueue": lambda: RemoteQueue.connect("127.0.0.1:1", "secret"),
    "TaskServer": lambda: TaskServer(3),
    "TaskBatches": lambda: TaskBatches(Queue().training, batch_size=0),
    "attach": lambda: limpet.attach(limpet.sinks.Terminal),
    "register_store": lambda: limpet.register_store("S 3", len),
    "DataLoader": lambda: limpet.DataLoader([1, 2], seed="x"),
    "elastic": lambda: limpet.elastic(3),
    "EverySteps": lambda: limpet.EverySteps(0),
    "AtSteps": lambda: limpet.AtSteps(["x"]),
    "EverySeconds": lambda: limpet.EverySeconds(-1),
    "KeepBest": lambda: limpet.KeepBest(1, "val", mode="up"),
    "KeepLast": lambda: limpet.KeepLast(0),
    "KeepSteps": lambda: limpet.KeepSteps(3),
    "StopWhen": lambda: limpet.StopWhen("accuracy"),
    "Never": lambda: limpet.Never() | limpet.EverySteps(1),
    "MemoryTier": lambda: limpet.MemoryTier(every=3),
    "LocalTier": lambda: limpet.LocalTier("s3://x"),
    "Preemption": lambda: limpet.Preemption(notices=[3]),
    "FileNotice": lambda: FileNotice(3),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    limpet.save("run/version_1", {"n": 1, "w": torch.ones(2)})
    return tmp_path


def shown_frames(error):
    """The frames that Python prints, as (file, line of code), outermost exception last."""
    text = traceback.format_exception(error)
    lines = [line for block in text for line in block.splitlines() if line.startswith('  File "')]
    return [line.split('"')[1] for line in lines]


def own_frames(error):
    return [file for file in shown_frames(error) if file.startswith((PACKAGE, "<string>"))]


def raised_by(call):
    with pytest.raises(limpet.errors.LimpetError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("name", FAILING)
def test_a_public_call_shows_at_most_three_frames(folder, name):
    error = raised_by(FAILING[name])
    text = "".join(traceback.format_exception(error))
    assert len(own_frames(error)) <= 3, text
    # the error itself: this function, the lambda or function above, and then Limpet
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert files[:2] == [__file__, __file__]
    assert "/contextlib.py" not in text
    assert f"{PACKAGE}/tracebacks.py" not in text


def test_the_frames_of_the_user_are_all_shown(folder):
    for name, code in (
        ("save member", "own_helper"),
        ("load own store", "own_request"),
        ("resume own store", "own_request"),
    ):
        text = "".join(traceback.format_exception(raised_by(FAILING[name])))
        assert f"in {code}" in text


def test_errors_of_every_rank(folder):
    def save(rank):
        limpet.save("run/version_2", {"member": Broken() if rank else 1})

    with FakeGroup(2) as group:
        for error in group.outcomes(save):
            assert isinstance(error, limpet.errors.LimpetError)
            text = "".join(traceback.format_exception(error))
            assert len(own_frames(error)) <= 3, text
            assert "in save\n" in text


def test_other_errors_keep_everything(folder, monkeypatch):
    """A bug of Limpet must be found by its traceback."""
    monkeypatch.setattr("limpet.snapshot.reader.SnapshotReader.__init__", lambda *a, **o: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        limpet.load("run@1")
    assert len(own_frames(caught.value)) > 3


def test_calls_by_limpet_itself_keep_everything(folder):
    code = "def call_from_inside():\n    limpet.load('absent')\n"
    inside = {"__name__": "limpet.inside", "limpet": limpet}
    exec(code, inside)
    assert len(own_frames(raised_by(inside["call_from_inside"]))) > 3
    assert len(own_frames(raised_by(lambda: limpet.load("absent")))) <= 3


@pytest.mark.slow
def test_the_development_mode_keeps_everything(folder):
    code = "import limpet; limpet.load('absent')"
    frames = {
        mode: subprocess.run(
            [sys.executable, *mode, "-c", code], capture_output=True, text=True, check=False
        ).stderr.count(f'File "{PACKAGE}')
        for mode in ((), ("-X", "dev"))
    }
    assert 1 <= frames[()] <= 3 < frames["-X", "dev"]


def test_a_frame_without_a_line():
    """As an instruction at which a handler of a signal raises may have none."""

    def list_or_raise(*args, **options):
        raise limpet.errors.Denied("Without a line")

    store = OwnStore("own")
    store.own_request = list_or_raise
    list_or_raise.__code__ = list_or_raise.__code__.replace(co_linetable=b"")
    error = raised_by(lambda: limpet.open(store))
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    assert (last.tb_frame.f_code.co_name, last.tb_lineno) == ("list_or_raise", None)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """It has no other traceback than its first one, and compares arrays."""

    value: object = dataclasses.field(default_factory=lambda: np.zeros(2))


def test_a_cause_that_cannot_be_changed_or_compared(folder):
    class Member:
        def state_dict(self):
            try:
                raise Frozen()
            except Frozen as e:
                raise Frozen from e

        def load_state_dict(self, state): ...

    with pytest.raises(limpet.errors.LimpetError) as e:
        limpet.save("frozen", {"member": Member()})
    assert type(e.value.__cause__) is Frozen


def test_a_cause_that_is_its_own_cause():
    """``__context__`` of an error that is raised again may lead back to it."""
    store = OwnStore("own")
    store.own_error = error = limpet.errors.Denied("One")
    error.__cause__ = limpet.errors.NotFound("Another one")
    error.__cause__.__cause__ = error
    for _ in range(2):
        assert raised_by(lambda: limpet.open(store)) is error
        assert len(own_frames(error)) <= 3


def public_objects():
    for module in (limpet, limpet.preemption, limpet.tasks):
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)


def enter_scope():
    guard = PreemptionGuard(save_fn=len, preemption=None)
    guard.close()
    with guard.watch_scope():
        pass


def leave_scope():
    ckpt = checkpointer("new")
    with PreemptionGuard(ckpt).watch_scope():
        ckpt.step()
        ckpt.close()


def raise_in_scope():
    with PreemptionGuard(checkpointer("new")).watch_scope():
        limpet.load("absent")


@pytest.mark.parametrize("call", [enter_scope, leave_scope, raise_in_scope])
def test_the_errors_of_a_scope(folder, call):
    """The frame of ``contextlib`` stays: it belongs to the user's ``with`` statement."""
    error = raised_by(call)
    text = "".join(traceback.format_exception(error))
    assert len(own_frames(error)) <= 3, text
    assert f"{PACKAGE}/tracebacks.py" not in text
    assert f"in {call.__name__}" in text


MISSPELLED = {
    "function": lambda: limpet.load("run@1", device_="cpu"),
    "word of another library": lambda: limpet.load("run@1", map_location="cpu"),
    "class": lambda: limpet.Checkpointer("run", {"n": 1}, evry=3),
    "method": lambda: checkpointer().resume(strickt=True),
    "method of a run": lambda: limpet.Run("run").find(step_=1),
    "generator": lambda: checkpointer().epochs(2, start=1),
}


@pytest.mark.parametrize("name", MISSPELLED)
def test_a_misspelled_keyword_shows_the_line_of_the_user_last(folder, name):
    with pytest.raises(TypeError, match="unexpected keyword argument") as caught:
        MISSPELLED[name]()
    assert own_frames(caught.value) == []
    assert shown_frames(caught.value)[-1] == __file__


def test_an_interrupt_keeps_everything(folder, monkeypatch):
    """It is no error of Limpet: where the program was is what one looks for."""
    ckpt = checkpointer("new")
    ckpt.step()

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("limpet.training.early_stop.EarlyStop.observe", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        ckpt.metrics({"a": 1})
    assert len(own_frames(caught.value)) >= 2
    monkeypatch.undo()
    ckpt.metrics({"a": 1})  # the interrupted call has ended
    ckpt.close()


def test_no_public_call_is_forgotten():
    """Every public function, and every public method of a class of Limpet, with its name, its
    module, its signature, and its documentation."""
    for name, found in public_objects():
        functions = {name: found} if inspect.isfunction(found) else {}
        if inspect.isclass(found):
            functions = {n: f for n, f in vars(found).items() if inspect.isfunction(f)}
        for label, function in functions.items():
            if not label.startswith("_"):
                assert function.shortens, (name, label)
                inner = inspect.unwrap(function)
                assert inspect.signature(function) == inspect.signature(inner)
                assert function.__doc__ == inner.__doc__
    assert "url: 'Url'" in str(inspect.signature(limpet.save))
    assert "check: 'bool' = False" in str(inspect.signature(limpet.Checkpointer.resume))
    assert list(inspect.signature(limpet.Checkpointer).parameters)[:2] == ["run", "state"]
    assert "check: 'bool' = False" in pydoc.render_doc(limpet.Checkpointer)
    assert pydoc.render_doc(limpet.Snapshot).count("The training step after which")
    for function in (limpet.save, limpet.load, limpet.open, limpet.export, limpet.Group.join):
        assert pickle.loads(pickle.dumps(function)) == function
