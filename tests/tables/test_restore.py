"""Restores: what does not fit, what has failed, and states that cannot be saved."""

import gc
import threading
import weakref
from contextlib import suppress
from functools import partial

import pytest
import torch

import limpet
from limpet import tables
from limpet.errors import LimpetError, NoSnapshot, PlanError, SaveFailed, StoreError, Unsupported
from limpet.format.names import MANIFEST
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.tables.rows import Rows
from tests.tables.contents import differing, live, saved
from tests.trainings import flip_bit, shard_of
from tests.unreliable_stores import HookedStore


def words(**options):
    return tables.Table(**{"name": "words", "dim": 4, "optimizer": tables.Adagrad(0.1), **options})


def push(servers, ids, name="words"):
    tables.Embedding(servers, name)(torch.tensor([*ids])).sum().backward()
    servers.step()


def saved_run(specs=(), count=2, **options):
    """The store of a run with versions 1 and 2, and what the tables had at 2."""
    store, servers = MemoryStore(), tables.Servers([*specs] or [words()], count)
    push(servers, range(500))
    with training(store, servers, **options) as ckpt:
        ckpt.step()
        push(servers, range(10))
        ckpt.step()
    return store, live(servers)


def training(store, servers, **options):
    state = {"tables": servers}
    ckpt = limpet.Checkpointer(store, state, **{"save": limpet.EverySteps(1), **options})
    ckpt.resume()
    return ckpt


# -- what does not fit ---------------------------------------------------------------------------


def test_all_that_does_not_fit_is_in_one_error_before_anything_changes():
    store, _ = saved_run([words(), tables.Table("users", 2, optimizer=tables.SGD(0.1))])
    other = {
        "dim": 8,
        "dtype": "bfloat16",
        "optimizer": tables.Adam(),
        "initializer": tables.Normal(0.5),
        "seed": 3,
    }
    servers = tables.Servers([words(**other), words(name="new")])
    push(servers, range(3))
    before = live(servers)
    for load in (
        lambda: Run(store).latest().load({"tables": servers}),
        lambda: training(store, servers),
    ):
        with pytest.raises(PlanError) as e:
            load()
        for part in (
            "tables/words/dim 4, live 8",
            "tables/words/dtype float32, live bfloat16",
            "tables/words/seed 0, live 3",
            "tables/words/initializer/kind Uniform, live Normal",
            "tables/users saved, not live",
            "7 with a different dtype or kind",  # five of them are shown
            "nothing was changed",
        ):
            assert part in str(e.value)
        assert len(e.value.fields["misfits"]) == 7
        assert live(servers) == before
    push(servers, range(3))  # they are still valid


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"optimizer": tables.Adagrad(0.1, initial_accumulator=1.0)}, "optimizer/initial_accum"),
        ({"initializer": tables.Uniform(0.5)}, "initializer/"),
        ({"optimizer": tables.RowwiseAdagrad(0.1)}, "kind Adagrad, live RowwiseAdagrad"),
    ],
)
def test_fields_of_optimizers_and_initializers(options, part):
    store, _ = saved_run()
    with pytest.raises(PlanError, match=part):
        training(store, tables.Servers([words(**options)]))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5)])
@pytest.mark.parametrize("count", [1, 2])
def test_the_admission_may_change(before, after, count):
    """Versions that refer to the restored one are exact, also if only one of both has counts."""
    store, found = saved_run([words(admit_after=before)], incremental=True)
    servers = tables.Servers([words(admit_after=after)], count)
    with training(store, servers, incremental=True) as ckpt:
        assert live(servers)["words"][0] == found["words"][0]
        for n in range(3):
            push(servers, [n, 1, 600 + n, 700])
            ckpt.step()
            ckpt.wait()
            assert not differing(saved(Run(store).latest()), live(servers))


def test_a_changed_learning_rate_is_restored_and_that_of_the_table_is_not():
    store, servers = MemoryStore(), tables.Servers([words()])
    with training(store, servers) as ckpt:
        servers.learning_rates["words"] = 0.25
        push(servers, range(3))
        ckpt.step()
    other = tables.Servers([words(optimizer=tables.Adagrad(7.0))])
    training(store, other)
    assert other.learning_rates == {"words": 0.25}


def test_values_that_this_release_does_not_know_are_named():
    servers = tables.Servers([words()])
    plain = servers.specs["words"].to_plain()
    for damage in ({"optimizer": {"kind": "Lion"}}, {"dim": "four"}, {"seed": None}):
        with pytest.raises(LimpetError, match="table that this release of Limpet does not know"):
            servers.differences({"words": {**plain, **damage}})


# -- restores that fail --------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [-1, -20_000])
def test_servers_are_not_used_after_a_failed_restore(byte):
    store, _ = saved_run()
    good, found = saved_run()
    for step in (1, 2):
        flip_bit(store, shard_of(store, f"version_{step}"), byte=byte)
    servers = tables.Servers([words()], 3)
    push(servers, range(9))
    with pytest.raises(NoSnapshot):
        training(store, servers)
    for use in (
        lambda: push(servers, range(9)),
        lambda: servers.lookup("words", [1]),
        lambda: servers.fill("words", [1], torch.ones(1, 4)),
        servers.statistics,
        lambda: limpet.save(MemoryStore(), {"tables": servers}),
    ):
        with pytest.raises(
            LimpetError, match=r"not valid, because a restore or .* failed: restore"
        ):
            use()
    servers.client.take()
    training(good, servers)
    assert not differing(live(servers), found)
    push(servers, range(9))


def test_a_damaged_part_of_one_server_invalidates_all():
    """The last rows are those of the last server."""
    store, _ = saved_run()
    flip_bit(store, shard_of(store, "version_2"), byte=-1)
    servers = tables.Servers([words()], 3)
    with pytest.raises(LimpetError):
        Run(store).latest().load({"tables": servers})
    with pytest.raises(LimpetError, match="not valid"):
        servers.lookup("words", [1])


# -- states --------------------------------------------------------------------------------------


def test_one_object_under_two_keys_is_refused():
    servers = tables.Servers([words()])
    for refused in (
        lambda: limpet.Checkpointer(MemoryStore(), {"a": servers, "b": servers}),
        lambda: limpet.save(MemoryStore(), {"a": servers, "b": servers}),
    ):
        with pytest.raises(LimpetError, match="one object as a and b: leave one out"):
            refused()
    limpet.save(MemoryStore(), {"a": servers})


def test_servers_below_the_top_level_are_refused():
    servers = tables.Servers([words()])
    for state in ({"a": {"b": servers}}, {"a": [servers]}):
        with pytest.raises(LimpetError, match=r"must be at the top level of the state: {\"tables"):
            limpet.Checkpointer(MemoryStore(), state)
        with pytest.raises(Unsupported, match="Put it itself into the state"):
            limpet.save(MemoryStore(), state)


def dense():
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("name", ["model", "net"])
def test_the_model_of_servers_is_not_in_the_state_twice(name):
    servers = tables.Servers([words()], dense=dense)
    model = servers.model if name == "net" else dense()[0]
    with pytest.raises(LimpetError, match=f"'{name}' in the state must be left out: 'tables' br"):
        limpet.Checkpointer(MemoryStore(), {"tables": servers, name: model})
    limpet.Checkpointer(MemoryStore(), {"tables": servers, "model": servers.model})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiers=", {"tiers": [limpet.MemoryTier(every=limpet.EverySteps(1))]}),
        ("overlap=True", {"overlap": True}),
        ("OnException", {"save": limpet.OnException() | limpet.EverySteps(2)}),
    ],
)
def test_options_that_need_a_copy_are_refused(name, options):
    with pytest.raises(LimpetError, match=f"{name} cannot be combined with 'tables'"):
        limpet.Checkpointer(MemoryStore(), {"tables": tables.Servers([words()])}, **options)


# -- several trainings ---------------------------------------------------------------------------


def test_a_cell_of_a_notebook_that_runs_twice():
    """Two Servers objects of one run: the newer one continues exactly, and the older one ends."""
    store, first = MemoryStore(), tables.Servers([words()])
    old = training(store, first)
    push(first, range(5))
    old.step()
    second = tables.Servers([words()])
    new = training(store, second)
    assert live(first) == live(second)
    push(second, range(3))
    new.step()
    new.wait()
    push(first, [1])
    with pytest.raises(LimpetError, match="newer one of this process has taken its run over"):
        old.step()
    new.close()
    assert not differing(saved(Run(store).latest()), live(second))


@pytest.mark.parametrize("blocked", ["write_at", "put_if_absent"])
@pytest.mark.parametrize("first_ends_first", [True, False])
@pytest.mark.parametrize("again", ["save", "failing", "load", "interrupt"])
def test_another_save_during_a_save(again, first_ends_first, blocked):
    """One of them may fail. What is saved then is exact, and no change is forgotten."""
    store, other = HookedStore(MemoryStore()), HookedStore(MemoryStore())
    servers, elsewhere = tables.Servers([words()], 2), saved_run()[0]
    reached = threading.Event()
    gates = {id(store): threading.Event(), id(other): threading.Event()}
    push(servers, range(500))

    def block(method, key, gate):
        if method == blocked and (method == "write_at" or key.endswith(MANIFEST)):
            reached.set()
            assert gate.wait(5)
            if again == "failing" and gate is gates[id(other)]:
                raise StoreError("the disk is gone")

    with training(store, servers, incremental=True, on_error="warn") as ckpt:
        ckpt.step()
        push(servers, range(5))
        ckpt.step()
        ckpt.wait()
        for each in (store, other):
            each.before = partial(block, gate=gates[id(each)])
        push(servers, range(3, 9))
        found = {3: live(servers)}
        ckpt.step()
        assert reached.wait(5)
        push(servers, range(7, 20))
        pending = None
        if again in ("save", "failing"):
            pending = limpet.save_async(other, {"tables": servers})
            saved_elsewhere = live(servers)
        elif again == "load":
            Run(elsewhere).latest().load({"tables": servers})
        else:
            servers.begin_save("tables", None, limpet.Group())
            servers.end_staging()
        push(servers, range(15, 25))
        for gate in [*gates.values()][:: 1 if first_ends_first else -1]:
            gate.set()
            with suppress(LimpetError, SaveFailed):
                if gate is gates[id(store)]:
                    ckpt.wait()
                elif pending is not None:
                    snapshot = pending.wait()
                    assert not differing(saved(snapshot), saved_elsewhere)
        for step in range(4, 8):
            push(servers, range(20 + step, 30 + step))
            found[step] = live(servers)
            with suppress(SaveFailed):
                ckpt.step()
            ckpt.wait()
    versions = {version.step: version for version in Run(store).snapshots()}
    assert {1, 2, 4, 5, 6, 7} <= versions.keys()
    for step in versions.keys() & found.keys():
        assert not differing(saved(versions[step]), found[step])


@pytest.mark.parametrize(
    ("of", "method"),
    [(tables.Servers, "_plan"), (Rows, "begin_cut"), (tables.Servers, "state_dict")],
)
def test_a_save_ends_while_another_one_begins(monkeypatch, of, method):
    """In another thread. It leaves the cuts and the locks of the other one."""
    servers, real, errors = tables.Servers([words()], 2), getattr(of, method), []
    push(servers, range(9))
    servers.begin_save("tables", None, limpet.Group())
    servers.end_staging()

    def end():
        try:
            servers.end_save(None, None)
        except Exception as e:
            errors.append(e)

    ending = threading.Thread(target=end)

    def end_the_first_one(*arguments, **options):
        patch.undo()
        ending.start()
        ending.join(0.2)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(of, method, end_the_first_one)
        with suppress(LimpetError):  # one of both may fail
            limpet.save(MemoryStore(), {"tables": servers})
    ending.join(10)
    assert not errors
    fill = threading.Thread(
        target=servers.fill, args=("words", [1], torch.ones(1, words().dim)), daemon=True
    )
    fill.start()
    fill.join(10)
    assert not fill.is_alive()
    for _ in range(2):
        snapshot = limpet.save(MemoryStore(), {"tables": servers})
        assert not differing(saved(snapshot), live(servers))


def test_a_restore_needs_no_memory_for_the_rows_of_the_last_save():
    """The Checkpointer has its sources until the next save."""
    store, servers = MemoryStore(), tables.Servers([words()], 2)
    with training(store, servers, incremental=True) as ckpt:
        push(servers, range(500))
        ckpt.step()
        ckpt.wait()
        rows = [weakref.ref(server.shards["words"].rows) for server in servers.servers]
        ckpt.resume()
        gc.collect()
        assert [row() for row in rows] == [None, None]


def test_a_save_fails_while_another_one_begins():
    """The failed one has locks for which the other one waits."""
    servers, threads = tables.Servers([words()], 2), []
    push(servers, range(9))

    def save():
        with suppress(LimpetError):  # both may fail
            limpet.save(MemoryStore(), {"tables": servers})

    class Failing:
        def state_dict(self):
            threads.append(threading.Thread(target=save, daemon=True))
            threads[0].start()
            threads[0].join(0.2)
            raise ValueError

        def load_state_dict(self, _):
            pass

    with pytest.raises(LimpetError, match="state_dict"):
        limpet.save(MemoryStore(), {"tables": servers, "failing": Failing()})
    threads[0].join(10)
    assert not threads[0].is_alive()
    snapshot = limpet.save(MemoryStore(), {"tables": servers})
    assert not differing(saved(snapshot), live(servers))


def test_a_second_resume_waits_for_the_save():
    """A rollback to version 1 while version 2 is written: version 3 is exact."""
    store, servers = HookedStore(MemoryStore()), tables.Servers([words()], 2)
    push(servers, range(500))
    is_open = threading.Event()
    is_open.set()
    store.before = lambda method, key: method != "write_at" or is_open.wait(5)
    with training(store, servers, incremental=True) as ckpt:
        push(servers, range(3))
        ckpt.step()
        ckpt.wait()
        push(servers, range(100, 130))
        is_open.clear()
        ckpt.step()
        timer = threading.Timer(0.2, is_open.set)
        timer.start()
        ckpt.resume(at=1)
        timer.join()
        push(servers, range(200, 205))
        ckpt.step()
        ckpt.wait()
        assert not differing(saved(Run(store).latest()), live(servers))
