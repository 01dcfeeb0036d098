"""Which version is evaluated next (BEHAVIOURS B 50, C 8)."""

from limpet.evaluation.options import Selection
from limpet.format.names import Version


def versions(*steps):
    return [Version(step) for step in steps]


def order(selection, arriving):
    """The steps in the order of their evaluation. ``arriving``: those saved before each look."""
    known: list[Version] = []
    done: set[Version] = set()
    found = []
    for steps in [*arriving, *[[]] * 20]:
        known += versions(*steps)
        version, waiting = selection.next(known, done, ())
        if version is None:
            continue
        assert version not in done
        assert version not in waiting
        found.append(version.step)
        done.add(version)
    return found


def test_the_newest_one_and_then_each_newer_one():
    assert order(Selection(), [[10, 20, 30]]) == [30]
    assert order(Selection(), [[10], [], [20], [30]]) == [10, 20, 30]


def test_50_if_versions_arrive_faster_the_older_ones_are_skipped():
    assert order(Selection(), [[10], [20, 30, 40], [50]]) == [10, 40, 50]


def test_50_a_version_is_evaluated_once_and_an_older_one_never_after_a_newer_one():
    assert order(Selection(), [[10], [], [], [20]]) == [10, 20]
    assert Selection().next(versions(10, 20), versions(20), ()) == (None, [])


def test_with_skip_none_the_oldest_comes_first_and_the_others_wait():
    selection = Selection(skip_none=True)
    assert order(selection, [[10, 20], [30], [40, 50]]) == [10, 20, 30, 40, 50]
    assert selection.next(versions(10, 20, 30), versions(10), ()) == (Version(20), versions(30))


def test_every_steps_takes_the_first_version_at_or_after_each_multiple():
    selection = Selection(every_steps=100, skip_none=True)
    steps = [30, 90, 110, 150, 200, 250, 420]
    assert order(selection, [steps]) == [110, 200, 420]
    assert order(Selection(every_steps=100), [[step] for step in steps]) == [110, 200, 420]


def test_a_failed_version_is_evaluated_again_only_on_request():
    known, failed = versions(10, 20, 30), versions(20, 30)
    assert Selection().next(known, versions(10), failed) == (None, [])
    again = Selection(retry=True).next(known, versions(10), failed)
    assert again == (Version(30), versions(20))
    both = Selection(retry=True, skip_none=True).next(known, versions(10), failed)
    assert both == (Version(20), versions(30))
