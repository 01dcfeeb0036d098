"""The rows of one table on one server: look-ups, updates, admission, and eviction."""

import itertools
import threading

import numpy as np
import pytest
import torch

from limpet import tables
from limpet.errors import LimpetError, ManifestInvalid
from limpet.tables.ids import BUCKETS, bucket_of
from limpet.tables.server import TableServer
from limpet.tables.shard import TableShard, check_rows
from tests.tables.ids import EXTREMES, unmix


def a_shard(dim=4, first=0, stop=BUCKETS, optimizer=None, **options):
    optimizer = tables.SGD(1.0) if optimizer is None else optimizer
    return TableShard(
        tables.Table("words", dim, optimizer=optimizer, **options), range(first, stop)
    )


def push(shard, ids, step=1, value=1.0, lr=1.0):
    ids = np.asarray(ids, np.int64)
    shard.push(ids, torch.full((len(ids), shard.table.dim), float(value)), lr=lr, step=step)


def fill(shard, ids, values, step=0):
    shard.fill(*check_rows(shard.table, ids, values), step=step)


def ids_of(shard):
    return {*shard.rows.column("ids").numpy()[shard.rows.live()].tolist()}


def entry(shard, name, i):
    return shard.rows.column(name)[int(shard.rows.find(np.array([i]))[0])].tolist()


# -- look-ups and updates ------------------------------------------------------------------------


def test_a_table_keeps_what_it_is_given():
    """B 9."""
    table = tables.Table("words", 8, optimizer=tables.SGD(0.1), initializer=tables.Constant(2))
    assert (table.name, table.dim, table.initializer) == ("words", 8, tables.Constant(2.0))
    assert table.dtype == torch.float32


def test_a_look_up_of_unseen_ids_has_one_vector_per_id_and_creates_nothing():
    """B 10, in another way: a row comes into being with its first gradient."""
    shard = a_shard()
    before = shard.statistics()
    vectors = shard.look_up(np.array([5, 6, 5]))
    assert vectors.shape == (3, 4)
    assert torch.equal(vectors[0], vectors[2])
    assert not torch.equal(vectors[0], vectors[1])
    assert shard.statistics() == before
    assert before["rows"] == 0


def test_a_look_up_of_nothing_is_empty():
    """B 11, with an empty result instead of None."""
    shard = a_shard()
    for _ in range(2):
        assert shard.look_up(np.empty(0, np.int64)).shape == (0, 4)
        push(shard, [1])
    push(shard, [])
    assert shard.statistics()["rows"] == 1


def test_only_new_ids_get_rows():
    """B 12."""
    shard = a_shard()
    push(shard, [0, 3, 7])
    push(shard, [0, 3, 8])
    assert shard.statistics()["rows"] == 4
    assert shard.statistics()["admitted"] == 4
    assert entry(shard, "counts", 0) == 2
    assert entry(shard, "counts", 8) == 1


def test_filled_vectors_are_exact():
    """B 13."""
    shard = a_shard(optimizer=tables.Adagrad(0.1, initial_accumulator=3.5))
    push(shard, [2, 3])
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    fill(shard, [1, 2, -1], values, step=9)
    assert (shard.look_up(np.array([-1, 1, 2])).numpy() == values[[2, 0, 1]]).all()
    assert entry(shard, "slot/sum", 2) == [3.5] * 4
    assert [entry(shard, n, 2) for n in ("counts", "last_steps")] == [0, 9]
    assert entry(shard, "slot/sum", 3) == [4.5] * 4
    fill(shard, torch.tensor([], dtype=torch.int64), torch.empty(0, 4))


def test_slots_begin_with_their_initial_value():
    """B 15, 18."""
    shard = a_shard(optimizer=tables.Adagrad(0.1, initial_accumulator=3.5))
    push(shard, [1], value=2)
    assert entry(shard, "slot/sum", 1) == [7.5] * 4
    assert {*shard.rows.columns} == {"ids", "values", "slot/sum", "counts", "last_steps"}


def test_the_same_id_has_the_same_vector_in_every_look_up_of_tables_of_any_dim():
    """B 16."""
    for dim in (4, 9):
        shard, ids = a_shard(dim), np.array([3, -1, 3])
        first = shard.look_up(ids)
        assert torch.equal(shard.look_up(ids), first)
        push(shard, [3])
        assert torch.equal(shard.look_up(ids)[1], first[1])
        assert torch.equal(shard.look_up(ids)[0], first[0] - 1)


def test_a_look_up_is_a_copy():
    """B 20."""
    shard = a_shard()
    push(shard, [1])
    vectors = shard.look_up(np.array([1]))
    before = vectors.clone()
    push(shard, [1])
    push(shard, range(100_000))
    assert torch.equal(vectors, before)


@pytest.mark.parametrize("ids", [EXTREMES, unmix(np.arange(5000, dtype=np.uint64))])
def test_rows_of_ids_made_to_collide_are_not_confused(ids):
    shard, ids = a_shard(initializer=tables.Constant(0.0)), np.asarray(ids)
    grads = torch.arange(len(ids)).float()[:, None].expand(-1, 4)
    shard.push(ids, grads, lr=1.0, step=1)
    assert torch.equal(shard.look_up(ids), -grads)
    assert torch.equal(shard.look_up(np.repeat(ids[:1], 200_000)), torch.zeros(200_000, 4))


def test_bfloat16_rows_have_float32_slots():
    shard = a_shard(optimizer=tables.Adam(), dtype=torch.bfloat16)
    push(shard, [1], value=0.5, lr=1e-3)
    assert shard.look_up(np.array([1])).dtype == torch.bfloat16
    assert shard.rows.column("slot/exp_avg").dtype == torch.float32
    assert entry(shard, "slot/step", 1) == [1.0]


def test_the_rate_of_an_update_is_given_with_it():
    shard = a_shard(initializer=tables.Constant(0))
    push(shard, [1], lr=0.5)
    push(shard, [1], lr=0.25)
    assert shard.look_up(np.array([1])).tolist() == [[-0.75] * 4]


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        (torch.ones(2, 5), r"The gradient of words must be float32 \[2, 4\], not .*\[2, 5\]"),
        (torch.ones(3, 4), r"The gradient of words must be float32 \[2, 4\]"),
        (torch.ones(2, 4).double(), "not 'torch.float64"),
    ],
)
def test_wrong_gradients_are_refused(grads, message):
    """B 26."""
    shard = a_shard()
    with pytest.raises(LimpetError, match=message):
        shard.push(np.arange(2), grads, lr=0.1, step=1)
    for lr in (-1, float("nan"), "1"):
        with pytest.raises(LimpetError, match="lr must be a number, 0 or more"):
            shard.push(np.arange(2), torch.ones(2, 4), lr=lr, step=1)
    assert shard.statistics()["rows"] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    shard = a_shard()
    push(shard, range(5))
    before = shard.look_up(np.arange(20))
    grads = torch.ones(20, 4)
    grads[7, 3] = bad
    grads[9:18] = bad
    with pytest.raises(
        LimpetError, match=r"gradients of words .* 10 ids such as 7, 9, 10, 11, 12\."
    ):
        shard.push(np.arange(20), grads, lr=0.1, step=2)
    assert torch.equal(shard.look_up(np.arange(20)), before)
    assert shard.statistics()["rows"] == 5


def test_gradients_that_are_not_finite_are_skipped_and_counted():
    shard = a_shard(nan="skip", initializer=tables.Constant(0))
    grads = torch.ones(3, 4)
    grads[1, 0], grads[1, 1] = float("inf"), -float("inf")
    shard.push(np.arange(3), grads, lr=1.0, step=1)
    assert ids_of(shard) == {0, 2}
    assert shard.statistics()["refused"] == 1
    assert shard.look_up(np.arange(3))[:, 0].tolist() == [-1, 0, -1]


def test_large_gradients_whose_sum_overflows_are_finite():
    shard = a_shard(initializer=tables.Constant(0))
    push(shard, range(10), value=3e38)
    assert (shard.look_up(np.arange(10)) == torch.tensor(-3e38)).all()


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([1, 2, 1], np.zeros((3, 4)), "ids of words has 1 twice"),
        ([1, 2], np.zeros((2, 3)), r"values of words must be floats \[2, 4\]"),
        ([1], np.zeros((1, 4), np.int64), "values of words must be floats"),
        ([1.5], np.zeros((1, 4)), "ids must be an array of integers"),
        ([[1]], np.zeros((2, 4)), "values of words must be floats"),
        ([1, 2], np.full((2, 4), 1e300), "values of words are not finite, of 2 ids such as 1, 2"),
    ],
)
def test_wrong_values_are_not_filled(ids, values, message):
    shard = a_shard()
    with pytest.raises(LimpetError, match=message):
        fill(shard, ids, values)
    assert shard.statistics()["rows"] == 0


def test_many_threads_look_up_and_push():
    shard = a_shard(initializer=tables.Constant(0))

    def work(number):
        for step in range(1, 21):
            push(shard, range(number * 100, number * 100 + 5000), step=step)
            assert not (shard.look_up(np.arange(0, 6000, 7)) % 1).any()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (shard.look_up(np.arange(300, 5000)) == -80).all()


# -- admission -----------------------------------------------------------------------------------


def test_an_id_is_admitted_with_its_kth_gradient():
    shard = a_shard(admit_after=3, initializer=tables.Constant(0))
    for step in (1, 2):
        push(shard, [5, 6], step=step)
    assert shard.statistics()["rows"] == 0
    assert (shard.look_up(np.array([5])) == 0).all()
    push(shard, [5], step=3)
    assert shard.look_up(np.array([5])).tolist() == [[-1.0] * 4]
    assert entry(shard, "counts", 5) == 3
    counts = {k: v for k, v in shard.statistics().items() if k != "bytes"}
    assert counts == {
        "rows": 1,
        "candidates": 1,
        "admitted": 1,
        "evicted": 0,
        "refused": 0,
        "dropped": 4,
    }
    push(shard, [5, 7], step=4)
    assert shard.look_up(np.array([5])).tolist() == [[-2.0] * 4]


def test_an_evicted_id_is_counted_from_the_start():
    shard = a_shard(admit_after=2)
    push(shard, [5])
    push(shard, [5], step=2)
    shard.delete(np.array([5]))
    push(shard, [5], step=3)
    assert shard.statistics()["rows"] == 0
    push(shard, [5], step=4)
    assert entry(shard, "counts", 5) == 2


def test_a_filled_id_needs_no_admission():
    shard = a_shard(admit_after=5)
    push(shard, [1])
    fill(shard, [1, 2], np.ones((2, 4)))
    assert ids_of(shard) == {1, 2}
    assert shard.statistics()["candidates"] == 0


def test_candidates_are_part_of_cuts():
    shard = a_shard(admit_after=2)
    push(shard, [1, 2])
    cut = shard.candidates.begin_cut(is_full=True)
    push(shard, [2, 3], step=2)
    assert cut.count == 2
    out = np.empty(2, np.int32)
    cut.read("counts", 0, 2, memoryview(out.view(np.uint8)))
    assert out.tolist() == [1, 1]
    cut.end(is_committed=True)
    assert shard.candidates.begin_cut(is_full=False).deleted.tolist() == [2]


# -- eviction ------------------------------------------------------------------------------------


def test_rows_never_exceed_the_maximum():
    shard = a_shard(evict=tables.Evict(max_rows=160))
    for step in range(1, 30):
        push(shard, range(step * 20, step * 20 + 40), step=step)
        assert shard.statistics()["rows"] <= 160
    push(shard, range(10_000, 11_000), step=30)
    assert shard.statistics()["rows"] == 150
    assert ids_of(shard) == {*range(10_850, 11_000)}


def test_the_least_recently_updated_rows_go_first_then_small_counts_then_small_ids():
    shard = a_shard(evict=tables.Evict(max_rows=16))
    push(shard, range(10), step=1)
    push(shard, range(10, 14), step=2)
    push(shard, [3, 4], step=2)
    push(shard, range(20, 23), step=3)  # 17 rows: 2 go
    assert ids_of(shard) == {*range(2, 14), 20, 21, 22}
    push(shard, [2, 5, 6, 7, 8, 9], step=4)
    push(shard, [30, 31], step=4)  # again 17; of step 2 with count 1 are 10 to 13
    assert ids_of(shard) == {*range(2, 10), 12, 13, 20, 21, 22, 30, 31}


def test_the_least_maximum_is_one_row_that_is_the_newest():
    shard = a_shard(evict=tables.Evict(max_rows=1))
    for step in range(1, 5):
        push(shard, [step], step=step)
        assert ids_of(shard) == {step}


def test_unused_rows_go_at_multiples():
    shard = a_shard(evict=tables.Evict(unused_steps=5, every=10), admit_after=2)
    for step in (1, 2):
        push(shard, [1], step=step)
    push(shard, [7], step=3)
    for step in (4, 5, 6):
        push(shard, [2], step=step)
    push(shard, [8], step=9)
    assert ids_of(shard) == {1, 2}
    push(shard, [3], step=10)
    assert ids_of(shard) == {2}
    assert shard.statistics()["candidates"] == 2
    assert shard.statistics()["evicted"] == 1


def test_rows_with_few_gradients_go_at_multiples():
    shard = a_shard(evict=tables.Evict(min_count=2, every=4))
    for step in (1, 2, 3):
        push(shard, [1, step + 10], step=step)
    assert ids_of(shard) == {1, 11, 12, 13}
    shard.evict(4)
    assert ids_of(shard) == {1}
    shard.evict(4)
    push(shard, [5], step=5)
    shard.evict(7)
    assert ids_of(shard) == {1, 5}


def test_eviction_does_not_depend_on_a_push_at_just_that_step():
    """Another server may have had one."""
    evict = tables.Evict(unused_steps=5, min_count=1, every=10)
    one, other = a_shard(evict=evict), a_shard(evict=evict)
    for shard in (one, other):
        push(shard, [1], step=1)
    push(one, [99], step=10)
    for shard in (one, other):
        push(shard, [1], step=12)
    assert entry(one, "counts", 1) == entry(other, "counts", 1) == 1
    assert torch.equal(one.look_up(np.array([1])), other.look_up(np.array([1])))


def test_eviction_after_a_restore_leaves_newer_rows():
    """The step of the last eviction is not saved."""
    shard = a_shard(evict=tables.Evict(min_count=2, every=10))
    fill(shard, [1], np.ones((1, 4)), step=15)
    fill(shard, [2], np.ones((1, 4)), step=9)
    push(shard, [3], step=16)
    assert ids_of(shard) == {1, 3}


def test_an_evicted_id_that_comes_back_is_new():
    """Initial vector, no slots, no count."""
    shard = a_shard(optimizer=tables.Adam(), evict=tables.Evict(max_rows=1))
    fresh = a_shard(optimizer=tables.Adam())
    for step in range(1, 5):
        push(shard, [1], step=step)
    push(shard, [2], step=5)
    assert torch.equal(shard.look_up(np.array([1])), fresh.look_up(np.array([1])))
    push(shard, [1], step=6)
    push(fresh, [1], step=6)
    for name in shard.rows.columns:
        assert entry(shard, name, 1) == entry(fresh, name, 1)


def test_a_server_has_its_part_of_the_maximum():
    ids = np.arange(20_000)
    evict, counts = tables.Evict(max_rows=4096), []
    for first, stop in itertools.pairwise([0, 1000, 1024, BUCKETS]):
        shard = a_shard(first=first, stop=stop, evict=evict)
        buckets = bucket_of(ids)
        push(shard, ids[(buckets >= first) & (buckets < stop)])
        counts.append(shard.statistics()["rows"])
    assert counts == [937, 22, 2880]


def test_deletion():
    shard = a_shard(admit_after=2)
    push(shard, [1, 2])
    push(shard, [1], step=2)
    assert shard.statistics()["rows"] == shard.statistics()["candidates"] == 1
    shard.delete(np.array([1, 2, 3]))
    assert shard.statistics()["rows"] == shard.statistics()["candidates"] == 0
    shard.delete(np.array([], np.int64))


# -- cuts ----------------------------------------------------------------------------------------


def test_filled_rows_are_in_the_next_increment():
    shard = a_shard()
    shard.rows.begin_cut(is_full=True).end(is_committed=True)
    fill(shard, [1, 2], np.ones((2, 4)))
    assert shard.rows.begin_cut(is_full=False).count == 2


def test_a_look_up_at_a_cut_shows_the_vectors_of_then():
    shard = a_shard()
    push(shard, [1, 2, 3])
    ids = np.array([1, 2, 3, 4])
    then = shard.look_up(ids)
    view = shard.rows.begin_view("values")
    view.old_bytes_limit = 2**40
    push(shard, [1, 4], step=2)
    shard.delete(np.array([2, 3]))
    push(shard, [*range(1000, 5000), 3], step=3)
    assert torch.equal(shard.look_up(ids, cut=view), then)
    assert not torch.equal(shard.look_up(ids), then)


def test_a_fill_waits_while_a_cut_has_too_many_old_rows():
    server = TableServer([a_shard().table], range(BUCKETS))
    shard = server.shards["words"]
    push(shard, range(100))
    cut = shard.rows.begin_cut(is_full=True)
    cut.old_bytes_limit = 1
    push(shard, [1])
    assert shard.rows.must_wait
    ids, vectors = check_rows(shard.table, [2], np.ones((1, 4)))
    thread = threading.Thread(target=server.fill, args=("words", ids, vectors, 0))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert shard.look_up(np.array([2])).shape == (1, 4)
    cut.end()
    thread.join(10)
    assert not thread.is_alive()


# -- Table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        tables.SGD(1),
        tables.Adam(betas=[0.5, 0.9]),
        tables.RowwiseAdagrad(2),
    ],
)
@pytest.mark.parametrize("initializer", [tables.TruncatedNormal(0, 1), tables.Constant()])
def test_a_table_is_the_same_after_a_save(optimizer, initializer):
    """B 14, 19."""
    table = tables.Table(
        "words", 3, optimizer=optimizer, initializer=initializer, dtype="bfloat16", seed=5
    )
    plain = table.to_plain()
    assert plain["optimizer"]["kind"] == type(optimizer).__name__
    assert tables.Table.from_plain(plain) == table
    assert table.differences(plain) == {}


def test_what_a_restore_does_not_allow_to_differ():
    saved = tables.Table("words", 64, optimizer=tables.Adagrad(0.1)).to_plain()
    live = tables.Table(
        "words",
        32,
        optimizer=tables.Adam(),
        dtype="bfloat16",
        seed=1,
        initializer=tables.Normal(0, 1),
        admit_after=3,
        nan="skip",
    )
    assert live.differences(saved) == {
        "dim": "64, live 32",
        "dtype": "float32, live bfloat16",
        "seed": "0, live 1",
        "initializer/kind": "Uniform, live Normal",
        "optimizer/kind": "Adagrad, live Adam",
    }


def test_what_may_differ():
    saved = tables.Table("words", 2, optimizer=tables.SGD(0.1, momentum=0.5)).to_plain()
    live = tables.Table("words", 2, optimizer=tables.SGD(0.2, momentum=0.9), admit_after=2)
    assert live.differences(saved) == {}
    live = tables.Table("words", 2, optimizer=tables.SGD(0.2))
    assert live.differences(saved) == {"optimizer/momentum": "0.5, live 0.0"}
    live = tables.Table("w", 2, optimizer=tables.SGD(1, 0.5), initializer=tables.Uniform(1))
    assert live.differences(saved) == {
        "name": "words, live w",
        "initializer/scale": "0.05, live 1.0",
    }


def test_a_table_of_a_later_release_is_an_error():
    """B 17."""
    plain = tables.Table("words", 2, optimizer=tables.SGD(0.1)).to_plain()
    for broken in (
        {**plain, "optimizer": {"kind": "Lion", "lr": 0.1}},
        {**plain, "initializer": {"kind": "Uniform", "width": 1}},
        {k: v for k, v in plain.items() if k != "dim"},
        {**plain, "dim": 0},
    ):
        with pytest.raises(ManifestInvalid, match="does not know"):
            tables.Table.from_plain(broken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "The name of a table must be a text"),
        ({"name": "a/b"}, "The name of a table must be a text"),
        ({"name": 3}, "The name of a table must be a text"),
        ({"dim": 0}, "dim of words must be a whole number, 1 or more, not 0."),
        ({"dtype": "float16"}, "dtype of words must be float32 or bfloat16, not 'float16'."),
        ({"dtype": [1]}, "dtype of words must be float32 or bfloat16"),
        (
            {"optimizer": torch.optim.SGD},
            "optimizer of words must be such as Adagrad(lr=0.05), not ",
        ),
        (
            {"initializer": 0.05},
            "initializer of words must be such as Uniform(0.05), not 0.05.",
        ),
        ({"seed": -1}, "seed of words must be a whole number"),
        ({"admit_after": 0}, "admit_after of words must be a whole number, 1 or more, not 0."),
        ({"evict": 1000}, "evict of words must be Evict(...) or None, not 1000."),
        ({"old_rows": "half"}, "old_rows of words must be a number, 0 or more, not 'half'."),
        ({"old_rows": -0.1}, "old_rows of words must be a number, 0 or more, not -0.1."),
        ({"old_rows": float("nan")}, "old_rows of words must be a number, 0 or more, not nan."),
        ({"nan": "ignore"}, 'nan of words must be "error" or "skip", not \'ignore\'.'),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(LimpetError) as raised:
        tables.Table(**{"name": "words", "dim": 4, "optimizer": tables.SGD(0.1), **options})
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "options", [{}, {"max_rows": 0}, {"unused_steps": 1.5}, {"min_count": 2, "every": 0}]
)
def test_wrong_evictions_are_refused(options):
    with pytest.raises(LimpetError, match=r"Evict must be"):
        tables.Evict(**options)
