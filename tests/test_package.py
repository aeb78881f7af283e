"""What is built and shipped: the wheel, its contents and the public names."""

import doctest
import importlib.metadata
import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import strucspars as ss
from strucspars import _public, core

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in (folder / "strucspars").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_an_installed_package_has_every_file_and_renders_a_report(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    subprocess.run([*install, "--target", str(packages), str(ROOT)], check=True)
    (installed,) = importlib.metadata.distributions(name="strucspars", path=[str(packages)])
    assert installed.version == ss.__version__
    files = files_below(packages)
    assert files == files_below(SOURCE)
    assert {"strucspars/py.typed", "strucspars/core/learning.py"} <= files
    check_that_it_renders(packages, tmp_path / "report")


def check_that_it_renders(packages: Path, out: Path) -> None:
    """Templates, style and script of the page are read from the installed package, with the dependencies from here."""
    run = ROOT / "results/cifar10/cifar10-resnet20-dense"
    program = (
        "import sys, strucspars; from strucspars.cli.main import main; print(strucspars.__file__); "
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "report", str(run), "--out", str(out)]
    variables = os.environ | {"PYTHONPATH": str(packages)}
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=packages, env=variables).stdout
    assert said.splitlines()[0] == str(packages / "strucspars" / "__init__.py")
    page = (out / "index.html").read_text()
    for name in ("style.css", "script.js"):
        assert (SOURCE / "strucspars/report" / name).read_text() in page
    assert "<h1>cifar10-resnet20-dense</h1>" in page


def test_public_names_are_listed_once_and_in_order() -> None:
    assert _public.__all__ == sorted(set(_public.__all__))
    found = {name for name, value in vars(_public).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert found == set(_public.__all__) - {"__version__", "core"}
    assert core.__all__ == sorted(set(core.__all__))
    assert set(_public.__all__) <= set(dir(ss))
    assert not hasattr(ss, "nothing")


def test_the_folder_export_does_not_hide_the_function() -> None:
    program = "from strucspars.export.storage import load; import strucspars as ss; print(callable(ss.export))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


PROMISED = {name: vars(_public)[name] for name in _public.__all__ if name not in ("__version__", "core")}
PROMISED |= {f"core.{name}": vars(core)[name] for name in core.__all__}


@pytest.mark.parametrize("name", PROMISED)
def test_every_public_name_shows_an_example_that_runs(name: str) -> None:
    promised = PROMISED[name]
    module = importlib.import_module(promised.__module__)
    (example,) = doctest.DocTestFinder(recurse=False).find(promised, name, module=module)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_core_runs_where_torch_is_missing() -> None:
    blocked = "import sys; sys.modules['torch'] = None; sys.modules['strucspars'] = type(sys)('strucspars')"
    package = f"sys.modules['strucspars'].__path__ = [{str(SOURCE / 'strucspars')!r}]"
    use = "from strucspars.core.learning import learn_permutations; print(learn_permutations([[1, 0], [0, 1]]).cost)"
    command = [sys.executable, "-c", f"{blocked}; {package}; {use}"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "0.0\n"


ONLY_BASE = """
import re, sys
from importlib import metadata
from importlib.machinery import PathFinder

def plain(name):
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", name)[0]).lower()

wanted, base = [plain(name) for name in sys.argv.pop(1).split(",")], {"strucspars"}
while wanted:
    name = wanted.pop()
    if name not in base:
        base.add(name)
        try:
            wanted += [plain(line) for line in metadata.requires(name) or [] if "extra ==" not in line]
        except metadata.PackageNotFoundError:
            pass
homes = metadata.packages_distributions()

class OnlyBase:
    @staticmethod
    def find_spec(name, path=None, target=None):
        home = homes.get(name.partition(".")[0], ["strucspars"])
        return PathFinder.find_spec(name, path, target) if base & set(map(plain, home)) else None

sys.meta_path[:] = [OnlyBase if finder is PathFinder else finder for finder in sys.meta_path]
sys.path_importer_cache.clear()
"""
LIBRARY = """
import torch
import strucspars as ss

for name in ss.__all__:
    getattr(ss, name)
model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 1))
images = torch.zeros(1, 4, 8, 8)
ss.convert_(model, ss.one_shot_plan(model, 0.3))
ss.fold(model, images)
try:
    ss.export(model, "x.onnx", example_inputs=images)
except ModuleNotFoundError as error:
    print(error)
try:
    import strucspars.integrations.lightning
except ModuleNotFoundError as error:
    print(error)
"""
PROGRAM = "import runpy; runpy.run_module('strucspars', run_name='__main__')"


def with_the_base_alone(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program as if only the base dependencies were installed."""
    base = ",".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    command = [sys.executable, "-c", ONLY_BASE + program, base, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_library_works_with_the_base_dependencies_alone() -> None:
    done = with_the_base_alone(LIBRARY)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "onnx is missing: pip install 'strucspars[onnx]'\nlightning is missing: pip install 'strucspars[lightning]'\n"
    )


def test_the_command_line_names_the_extra_that_is_missing() -> None:
    done = with_the_base_alone(PROGRAM, "--help")
    assert (done.returncode, done.stderr) == (2, "error: typer is missing: pip install 'strucspars[cli]'\n")
