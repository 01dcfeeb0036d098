"""The shape of the package: public names, import cost, size limits, and no leftovers."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import limpet
import limpet.storage

ROOT = Path(limpet.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def test_public_names_are_sorted_and_exist():
    assert limpet.__all__ == sorted(limpet.__all__)
    for name in limpet.__all__:
        assert getattr(limpet, name) is not None
    assert dir(limpet) == limpet.__all__
    with pytest.raises(AttributeError, match="no attribute 'Manager'"):
        _ = limpet.Manager


PACKAGES = [limpet.preemption, limpet.storage, limpet.tables, limpet.tasks]


@pytest.mark.parametrize("package", [limpet, *PACKAGES])
def test_type_checkers_see_every_public_name(package):
    """In strict mode, they see what is imported "as" itself, or assigned."""
    seen = set()
    for node in ast.walk(ast.parse(Path(package.__file__).read_text())):
        if isinstance(node, ast.ImportFrom):
            seen.update(a.asname for a in node.names if a.asname == a.name)
        elif isinstance(node, ast.Assign):
            seen.update(t.id for t in node.targets if isinstance(t, ast.Name))
    assert set(package.__all__) <= seen


@pytest.mark.parametrize("package", PACKAGES)
def test_the_names_of_a_public_package_are_sorted_and_exist(package):
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    assert dir(package) == package.__all__
    with pytest.raises(AttributeError, match="no attribute 'Manager'"):
        _ = package.Manager


def run_in_new_interpreter(code):
    """Run ``code`` in a new interpreter and return its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_limpet_loads_neither_torch_nor_rich():
    code = (
        "import sys, limpet, limpet.preemption, limpet.tables, limpet.tasks\n"
        "print([m for m in ('torch', 'rich', 'numpy') if m in sys.modules])"
    )
    assert run_in_new_interpreter(code) == "[]"


def test_saving_arrays_does_not_import_torch():
    code = (
        "import sys, limpet, numpy as np\n"
        "limpet.save('memory://m/version_1', {'x': np.arange(3), 'n': 1})\n"
        "assert limpet.load('memory://m/version_1')['x'].tolist() == [0, 1, 2]\n"
        "print([m for m in ('torch', 'rich', 'click') if m in sys.modules])"
    )
    assert run_in_new_interpreter(code) == "[]"


def test_the_help_of_all_commands_imports_none_of_them():
    code = (
        "import sys, limpet.cli\n"
        "text = limpet.cli.cli.get_help(limpet.cli.click.Context(limpet.cli.cli))\n"
        "assert all(f'  {verb}  ' in text for verb in limpet.cli.VERBS)\n"
        "print([m for m in sys.modules if m.startswith(('rich', 'numpy', 'limpet.cli.verbs'))])"
    )
    assert run_in_new_interpreter(code) == "[]"


def test_a_step_that_saves_imports_nothing():
    """An import takes time in which the training waits, and leaves Python's import lock acquired if
    a signal handler raises."""
    code = (
        "import sys, tempfile, limpet, numpy as np\n"
        "state = {'x': np.zeros(3), 'progress': limpet.Progress()}\n"
        "save = limpet.EverySteps(1) | limpet.OnException()\n"
        "keep = limpet.KeepLast(1) | limpet.KeepBest(1, 'loss')\n"
        "with limpet.Checkpointer(tempfile.mkdtemp(), state, save=save, keep=keep) as ckpt:\n"
        "    before = {*sys.modules}\n"
        "    for _ in range(4):\n"
        "        ckpt.step({'loss': 1.0})\n"
        "        ckpt.wait()\n"
        "    print({*sys.modules} - before)"
    )
    assert run_in_new_interpreter(code) == "set()"


def test_every_error_is_in_the_tree_of_the_module_docstring():
    errors = limpet.errors
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, Exception):
            assert issubclass(kind, errors.LimpetError | Warning)
            assert issubclass(kind, Warning) or name in (errors.__doc__ or "")


def test_the_error_tree_is_as_designed():
    """A program that catches one of these classes relies on what else it catches."""
    errors = limpet.errors
    tree = {
        "FormatError": ["ManifestInvalid", "FormatTooNew", "DigestMismatch"],
        "StoreError": ["NotFound", "AlreadyExists", "Denied", "NoSpace", "Unavailable"],
        "PlanError": [
            "MissingLeaf", "UnexpectedLeaf", "ShapeMismatch", "DTypeMismatch", "Unsupported",
        ],
        "CommitError": ["RankFailed", "DeadlinePassed"],
        "NoSnapshot": [],
        "TaskError": ["LeaseLost", "JobFailed"],
    }  # fmt: skip
    assert errors.LimpetError.__bases__ == (Exception,)
    for parent, children in tree.items():
        assert getattr(errors, parent).__bases__ == (errors.LimpetError,)
        for child in children:
            assert getattr(errors, child).__bases__ == (getattr(errors, parent),)
    for left in (errors.Preempted, errors.NoProgress):
        assert left.__bases__ == (SystemExit,)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_functions_stay_small(file):
    text = file.read_text()
    assert not re.search(r"#.*\b(TODO|FIXME|XXX|HACK)\b", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 66, node.name
        if isinstance(node, ast.ClassDef):
            vague = re.search(r"(Manager|Handler|Helper|Utils?|Info|Context|Data)$", node.name)
            assert not vague or node.name == "LimpetManager", node.name  # a word of torchtitan


def test_only_settings_reads_the_environment():
    readers = {f.name for f in FILES if re.search(r"\bos\.(environ|getenv)\b", f.read_text())}
    assert readers <= {"settings.py", "console.py"}  # console.py reads the terminal width


def test_save_and_load_recipes_stay_short():
    for name, limit in (("saving/save.py", 250), ("loading/load.py", 200)):
        assert (ROOT / name).read_text().count("\n") <= limit


MAKES_TENSORS = {
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "eye", "full", "linspace", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "sparse_compressed_tensor",
    "sparse_coo_tensor", "tensor", "zeros",
}  # fmt: skip


def test_every_new_tensor_has_an_explicit_device():
    """Otherwise, it would be on the device of ``torch.set_default_device``."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and re.match(r"torch\.\w+$", ast.unparse(node.func)):
                name = ast.unparse(node.func).removeprefix("torch.")
                is_explicit = any(keyword.arg == "device" for keyword in node.keywords)
                assert is_explicit or name not in MAKES_TENSORS, f"{file}:{node.lineno}"
