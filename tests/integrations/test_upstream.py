"""The script that runs PyTorch's own tests: what it counts as passed."""

import pytest

from tests.integrations import upstream

TESTS = {
    "test_ends.py": """
import os, unittest
import pytest

class TestA(unittest.TestCase):
    def test_passes(self):
        pass

    def test_fails(self):
        assert 1 == 2

    @unittest.skip("not here")
    def test_skipped(self):
        pass

    @pytest.fixture(autouse=True)
    def fixture(self):
        yield
        assert "fails_late" not in self.id(), "in the teardown"

    def test_fails_late(self):
        pass
""",
    "test_interrupted.py": """
def test_before():
    pass

def test_interrupted():
    raise KeyboardInterrupt

def test_after():
    pass
""",
    "test_killed.py": """
import os, signal

def test_before():
    pass

def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)
""",
    "test_exits.py": """
import os

def test_exits():
    os._exit(0)
""",
    "test_hangs.py": """
import time

def test_before():
    pass

def test_hangs():
    time.sleep(600)
""",
    "test_not_importable.py": "import a_module_that_is_missing",
    "test_empty.py": "",
}


def outcomes(tmp_path, name):
    checkout = tmp_path / "checkout" / "test" / "distributed" / "checkpoint"
    checkout.mkdir(parents=True)
    (checkout / name).write_text(TESTS[name])
    folder = tmp_path / "copies"
    folder.mkdir()
    tests = upstream.copy_tests(tmp_path / "checkout", folder, use_dcp_classes=True)
    return {test: (end, reason) for test, end, reason in upstream.run_file(tests / name, folder)}


def test_the_ends_of_tests_are_distinguished(tmp_path):
    found = outcomes(tmp_path, "test_ends.py")
    assert {test: end for test, (end, _) in found.items()} == {
        "TestA.test_passes": "passed",
        "TestA.test_fails": "failed",
        "TestA.test_skipped": "skipped",
        "TestA.test_fails_late": "failed",
    }
    assert "in the teardown" in found["TestA.test_fails_late"][1]


@pytest.mark.parametrize(
    ("file", "test", "end"),
    [
        ("test_interrupted.py", "test_interrupted", "exit code 2"),
        ("test_killed.py", "test_killed", "exit code -9"),
        ("test_hangs.py", "test_hangs", "not finished within"),
    ],
)
def test_an_interrupted_test_has_failed(tmp_path, monkeypatch, file, test, end):
    if file == "test_hangs.py":
        monkeypatch.setattr(upstream, "FILE_TIMEOUT", 8)
    found = outcomes(tmp_path, file)
    assert found["test_before"] == ("passed", "")
    assert found[test] == ("failed", "interrupted")
    assert found["(all)"][0] == "failed"
    assert end in found["(all)"][1]
    assert found.keys() == {"test_before", test, "(all)"}


def test_a_test_that_ends_its_process_has_failed_even_with_exit_code_0(tmp_path):
    assert outcomes(tmp_path, "test_exits.py") == {"test_exits": ("failed", "interrupted")}


def test_a_file_that_cannot_be_imported_has_failed(tmp_path):
    found = outcomes(tmp_path, "test_not_importable.py")
    assert {end for end, _ in found.values()} == {"failed"}
    assert found["(collection)"][1].startswith("ImportError while importing test module")


def test_a_file_without_tests_has_none(tmp_path):
    assert outcomes(tmp_path, "test_empty.py") == {}
