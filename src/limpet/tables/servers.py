"""``Servers``: the tables of a training, in this process or on servers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from threading import RLock
from typing import Any, Literal

import torch

from limpet import events
from limpet.arguments import check_count, check_whole, real, require
from limpet.errors import LimpetError
from limpet.loading.snapshot import Snapshot, reader_of
from limpet.ranks.group import Group
from limpet.run.run import Run
from limpet.settings import read_settings
from limpet.snapshot.reader import SnapshotReader
from limpet.state.walk import find_instances
from limpet.tables.client import ServersLost, TableClient, call_all
from limpet.tables.coordinator import Coordinator, Synchronous
from limpet.tables.dense import DensePart, check_updates
from limpet.tables.driver import Driver, Work
from limpet.tables.ids import BUCKETS, to_ids
from limpet.tables.local import LocalEngine
from limpet.tables.member import TableMember, saved_tables
from limpet.tables.messages import Push, Rates
from limpet.tables.segments import equal_ranges
from limpet.tables.server import TableServer
from limpet.tables.shard import check_rows
from limpet.tables.table import MOST, Table
from limpet.tables.worker import Worker
from limpet.tasks.queue import Queue
from limpet.tracebacks import short_tracebacks
from limpet.training.checkpointer import Checkpointer
from limpet.training.training_evaluation import TrainingEvaluation


@short_tracebacks
class Servers(TableMember, AbstractContextManager["Servers", None]):
    """The servers of some tables: a member of the state of a training.

    In one process, ``EmbeddingBag(servers, NAME)`` looks rows up, and ``step`` applies the
    gradients of ``backward`` (see ``docs/tables.md``)::

        servers = tables.Servers([tables.Table("words", 64, optimizer=tables.Adagrad(lr=0.05))])
        state = {"model": model, "optimizer": optimizer, "tables": servers, "loader": loader}

    With several workers, ``train`` runs a function in each of them.

    ``specs``: the tables, of different names. ``count``: the number of servers, each of which has
    the rows of a part of the buckets. ``engine="ray"``: each server is an actor of a Ray cluster,
    and so are the workers. ``ray``: options of the servers, such as ``{"memory": 8 << 30}``; they
    end with ``close``. ``dense``: a function that returns the model and the optimizer of its
    parameters, and maybe a learning-rate scheduler; it is called once, here.
    ``staleness=k``: a worker's step is refused if others have made more than k steps since it was
    answered; with ``scale_by_staleness``, its learning rates are divided by that number.
    ``grads_to_wait=g``: a step consists of g consecutive mini-batches, with the average of the
    dense gradients and the sum of those of rows: the result does not depend on the number of
    workers and servers. ``seed``: of the random numbers of these mini-batches.
    ``lost``: what returns to the newest version if a server on Ray is lost: ``"all"``, or only its
    ``"buckets"`` and dense tensors, while everything else stays as it is.

    Raises ``LimpetError`` for invalid arguments.
    """

    def __init__(  # noqa: PLR0913  (public interface: the user decides each of them)
        self,
        specs: Sequence[Table],
        count: int = 1,
        *,
        engine: Literal["local", "ray"] = "local",
        ray: Mapping[str, Any] | None = None,
        dense: Callable[[], Any] | None = None,
        staleness: int | None = None,
        scale_by_staleness: bool = False,
        grads_to_wait: int | None = None,
        seed: int = 0,
        lost: Literal["all", "buckets"] = "all",
    ) -> None:
        is_valid = isinstance(specs, Sequence) and all(isinstance(spec, Table) for spec in specs)
        require("specs", is_valid and bool(specs), "a list of Table", specs)
        names = [spec.name for spec in specs]
        for name in names:
            require("specs", names.count(name) == 1, "tables of different names", name)
        count = check_whole("count", count, f"a number of servers, 1 to {BUCKETS}", 1, BUCKETS)
        require("engine=", engine in ("local", "ray"), '"local" or "ray"', engine)
        require("ray=", engine == "ray" or ray is None, 'None without engine="ray"', ray)
        require("lost=", lost in ("all", "buckets"), '"all" or "buckets"', lost)
        can_differ = engine == "ray" and grads_to_wait is None
        expected = '"all" without engine="ray", or with grads_to_wait='
        require("lost=", lost == "all" or can_differ, expected, lost)
        self._lost = lost
        if engine == "local" and read_settings().launched_world_size > 1:
            raise LimpetError(
                'engine="local" has the tables in one process, but torchrun has started several:'
                " start one process, and give it workers"
            )
        self.learning_rates = {spec.name: spec.optimizer.lr for spec in specs}
        """The learning rate of each table. It may be changed between two steps, and is saved."""

        self._coordinator: Coordinator
        if grads_to_wait is None:
            staleness = None if staleness is None else check_count("staleness=", staleness, 0)
            self._coordinator = Coordinator(self._rates, staleness, bool(scale_by_staleness))
        else:
            is_alone = staleness is None and not scale_by_staleness
            require("staleness=", is_alone, "None with grads_to_wait=", staleness)
            grads_to_wait = check_count("grads_to_wait=", grads_to_wait)
            self._coordinator = Synchronous(self._rates, grads_to_wait)
        self._seed = seed if grads_to_wait is not None else None
        self._prepare_dense(dense)
        servers = self._make_servers(specs, count) if engine == "local" else []
        super().__init__(specs, servers, first=0, count=count)
        self.make_mark = self._coordinator.mark
        self._engine: Any = LocalEngine(self.servers)
        if engine == "ray":
            from limpet.tables.ray_engine import RayEngine

            members = {"model": self.model, "optimizer": self.optimizer} if dense else {}
            self._engine = RayEngine(specs, count, members, ray or {})
        self.client = TableClient()
        self._place()
        self._driver: Driver | None = None

    def __repr__(self) -> str:
        return f"<Servers of {', '.join(self.specs)} on {self.count}>"

    __reduce__ = TableClient.__reduce__

    def _prepare_dense(self, dense: Callable[[], Any] | None) -> None:
        self._lock = RLock()  # of the optimizer, which a server of this process shares
        self.model: torch.nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: Any = None
        if dense is not None:
            made = dense()
            is_valid = isinstance(made, tuple) and len(made) in (2, 3)
            is_valid = is_valid and isinstance(made[0], torch.nn.Module)
            is_valid = is_valid and isinstance(made[1], torch.optim.Optimizer)
            expected = "a function that returns (model, optimizer) or (model, optimizer, scheduler)"
            require("dense=", is_valid, expected, made)
            self.model, self.optimizer, self.scheduler = (*made, None)[:3]
            check_updates(self.optimizer, self.scheduler)
            self.optimizer.zero_grad()
            self.optimizer.step()  # of nothing: a scheduler warns if it steps before the first one

    def _make_servers(self, specs: Sequence[Table], count: int) -> list[TableServer]:
        servers = [TableServer(specs, buckets) for buckets in equal_ranges(count)]
        if self.model is not None and self.optimizer is not None:
            servers[0].dense = DensePart(self.model, self.optimizer, self._lock)
        return servers

    def _place(self) -> None:
        firsts = [buckets.start for buckets in self.ranges]
        self.client.connect(self.specs.values(), firsts, self._engine.call)

    def _rates(self) -> Rates:
        rates = dict[str, float]()
        for name in {**self.learning_rates, **self.specs}:
            self.client.table(name)
            rate = self.learning_rates.get(name)
            is_valid = (number := real(rate)) is not None and 0 <= number <= MOST
            require(f"The learning rate of {name}", is_valid, "a number, 0 or more", rate)
            rates[name] = float(self.learning_rates[name])
        with self._lock:
            groups = [] if self.optimizer is None else self.optimizer.param_groups
            return Rates(rates, [float(group["lr"]) for group in groups])

    @property
    def members(self) -> dict[str, Any]:
        """What else a state with these servers has in this process: the scheduler, and the dense
        model and its optimizer unless servers have them, if there are."""
        found = {"model": self.model, "optimizer": self.optimizer} if self.servers else {}
        found["scheduler"] = self.scheduler
        return {name: value for name, value in found.items() if value is not None}

    # -- one process -----------------------------------------------------------------------------

    def step(self) -> None:
        """Apply the gradients that ``backward`` has computed since the last step, once, and forget
        them. Raises ``LimpetError`` for gradients that are not finite: then, nothing is applied."""
        rates, step = self._rates(), self._coordinator.step + 1
        pushes = [Push(rows, {}, {}) for rows in self.client.split(self.client.take())]
        self._engine.call("check", {n: (push,) for n, push in enumerate(pushes)})
        self._engine.call("update", {n: (push, step, rates) for n, push in enumerate(pushes)})
        self._coordinator.step = step

    def fill(self, name: str, ids: Any, values: Any) -> None:
        """Set the rows of distinct ids (integers ``[n]``) to ``values`` (floats ``[n, dim]``), as
        new rows without slots. Raises ``LimpetError`` before anything changes."""
        ids, vectors = check_rows(self.client.table(name), ids, values)
        parts = self.client.split({name: (ids, vectors)})
        step = self._coordinator.step
        calls = {n: (name, *part[name], step) for n, part in enumerate(parts) if part}
        self._engine.call("fill", calls)

    def lookup(self, name: str, ids: Any) -> torch.Tensor:
        """Return the vectors of ids (integers ``[n]``), ``[n, dim]`` of the table's dtype: rows, or
        initial vectors. Nothing changes, and no gradients are collected."""
        return self.client.pull(name, to_ids(ids).reshape(-1))

    def statistics(self) -> dict[str, dict[str, int]]:
        """Return for each table the sums over the servers: rows, bytes of memory, candidates (ids
        that are not yet admitted), and since the start, rows admitted and evicted, and gradients
        refused (not finite) and dropped (not admitted). ``buckets_returned``: how often, since the
        run began, a bucket of all tables has returned to a version (``lost="buckets"``)."""
        servers = [*call_all(self._engine, "statistics").values()]
        returned = sum(each["stop_bucket"] - each["first_bucket"] for each in self.losses)
        return {
            name: {key: sum(each[name][key] for each in servers) for key in servers[0][name]}
            | {"buckets_returned": returned}
            for name in self.specs
        }

    # -- workers ---------------------------------------------------------------------------------

    def train(
        self,
        train: Callable[[Worker], object],
        *,
        workers: int,
        queue: Queue,
        ckpt: Checkpointer,
        evaluation: TrainingEvaluation | None = None,
        ray: Mapping[str, Any] | None = None,
    ) -> None:
        """Run ``train(worker)`` in each of ``workers`` until the training tasks of ``queue`` are
        consumed, or ``ckpt.should_stop`` is True. Each step calls ``ckpt.step``.

        ``train`` is called again in place of a worker that is lost. If a server on Ray is lost, all
        return to the newest version (see ``lost=``), and all workers begin again; a run that has
        none gets one at the beginning. ``ray``: options of the actors of workers. ``evaluation``:
        with the same queue; the workers do its tasks, also those of the last step. Raises the error
        of ``train``, which ends all workers, and what ``ckpt.step`` and ``evaluation.step`` raise.
        """
        workers = check_count("workers=", workers)
        require("queue=", isinstance(queue, Queue), "a Queue", queue)
        require("ckpt=", isinstance(ckpt, Checkpointer), "a Checkpointer", ckpt)
        require("train", callable(train), "a function", train)
        require("ray=", ray is None or not self.servers, 'None without engine="ray"', ray)
        if evaluation is not None:
            is_valid = isinstance(evaluation, TrainingEvaluation) and evaluation.queue is queue
            expected = "a TrainingEvaluation with this queue="
            require("evaluation=", is_valid, expected, evaluation)
            evaluation.servers = self
        for member in (self, queue):
            if not any(found is member for found in find_instances(ckpt.state, type(member))):
                raise LimpetError(f"The state of the Checkpointer must have the {member!r}")
        if self._driver is not None:
            raise LimpetError("train() of these Servers is running: call it again after its end")
        if self._coordinator.ledger:  # of a call that has raised: these records are consumed
            call_all(self._engine, "mark", self._coordinator.mark())
        self._coordinator.queue = queue
        self._begin_generation(ckpt.current_step)
        if not (self.servers or ckpt._is_never or ckpt._saver.newest_step is not None):
            ckpt.save()
        work = Work(train, self.client, queue, self._seed, ray or {})
        self._engine.prepare(work)
        self._driver = Driver(
            self._coordinator,
            self._engine,
            work,
            ckpt,
            evaluation=evaluation,
            workers=workers,
            after_step=self._after_step,
            recover=lambda: self._recover(ckpt),
        )
        try:
            self._driver.run()
        finally:
            self._driver = None

    def _recover(self, ckpt: Checkpointer) -> None:
        """Start other servers in place of those that are lost, and return to the newest version."""
        has_ended = False
        while not has_ended:
            with suppress(LimpetError):  # the save in flight fails, which is an event
                newest = ckpt.wait()
                has_ended = True
        ckpt._join_members()
        if self._lost == "all":
            newest = ckpt.resume()
        elif newest is not None:
            self._return_buckets(newest, ckpt)
        if newest is None:
            raise LimpetError(f"A server was lost, and {ckpt.run.url} has no version to return to")
        self._begin_generation(ckpt.current_step)

    def _return_buckets(self, newest: Snapshot, ckpt: Checkpointer) -> None:
        """Let new servers read their buckets of a version, and the others apply all commits."""
        step, version = ckpt.current_step, newest.version
        place = newest.url, reader_of(newest).digest
        found = call_all(self._engine, "recover", self._coordinator.mark(), *place)
        for number, buckets in [item for item in found.items() if item[1] is not None]:
            if buckets != self.ranges[number]:
                what = f"{newest.url} has other buckets for server {number} than this training"
                raise LimpetError(what, expected=self.ranges[number], found=buckets)
            loss = {"first_bucket": buckets.start, "stop_bucket": buckets.stop}
            self.losses.append({"step": step, "version_step": version.step, **loss})
            name = f"server {number}"
            events.emit(
                "buckets_returned", run=ckpt.run.url, server=name, version=str(version), step=step
            )

    def hold(self) -> str:
        """Hold the rows and dense values of now for an evaluation, and return the name of the cut;
        ``release`` ends it."""
        mark = self._coordinator.mark()
        cut = str(mark.epoch)
        try:
            call_all(self._engine, "hold", mark)
        except BaseException:
            self.release(cut)
            raise
        return cut

    def release(self, cut: str) -> None:
        """End a cut of ``hold``."""
        with suppress(ServersLost):  # then, another generation begins
            call_all(self._engine, "release", cut)

    def resize_workers(self, workers: int) -> None:
        """Change the number of workers of ``train`` while it runs, from any thread."""
        if self._driver is None:
            raise LimpetError("resize_workers() changes the number of workers of a running train()")
        self._driver.workers = check_count("workers", workers)

    def _begin_generation(self, step: int) -> None:
        self._coordinator.restart(step)
        call_all(self._engine, "restart", self._coordinator.generation, self._coordinator.epoch)

    def _after_step(self) -> None:
        if self.client.take():
            todo = "use worker.tables in the function of a worker"
            raise LimpetError(f"Nobody pushes gradients of rows looked up in the Servers: {todo}")
        if self.scheduler is not None:
            with self._lock:
                self.scheduler.step()

    def join(self, key: str, run: Run) -> Group | None:
        return None if self.servers else self._engine.join_group(key, run)

    def restored(self, saved: Mapping[str, Any], snapshot: SnapshotReader) -> None:
        self.client.take()  # gradients of before
        for name, table in saved.items():
            self.learning_rates[name] = table["optimizer"]["lr"]
            self._coordinator.step = table["step"]
            self._coordinator.batches_done = table["batches"]
        if self.optimizer is not None and not self.servers:  # they have restored the model
            groups = saved_tables(snapshot, "optimizer")["groups"]
            for group, other in zip(self.optimizer.param_groups, groups, strict=True):
                group["lr"] = other["lr"]
        self._begin_generation(self._coordinator.step)  # without what was pushed before
        self._place()

    def close(self) -> None:
        """Release the servers on Ray. Those of this process end with this object."""
        if not self.servers:
            self._engine.close()

    def __exit__(self, *exception: object) -> None:
        self.close()
