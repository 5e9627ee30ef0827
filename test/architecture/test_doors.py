"""The doors to the outside world are where the design says, and files stay readable."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "python").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
MAX_LINES = 350
"""The aim is 300."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(path: Path) -> str:
    """`adapter`, `cli`, `kernels`, ... or the module itself, if it lies in no room."""
    parts = path.relative_to(ROOT).parts
    return "kernels" if parts[0] == "kernels" else parts[2] if len(parts) > 3 else path.stem


def calls_and_attributes(path: Path) -> set[str]:
    """Dotted names used, and names called: `torch.cuda.Stream`, `open()`, `.read_text()`."""
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            used.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            used.add(f"{node.func.id}()")
    return used


@pytest.mark.parametrize("path", FILES, ids=name)
def test_only_the_device_door_the_kernels_and_the_adapter_name_cuda(path):
    if room(path) not in ("device", "kernels", "adapter"):
        assert not [used for used in calls_and_attributes(path) if used.startswith("torch.cuda")]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_only_the_machine_the_cli_the_adapter_and_the_kernel_build_open_files(path):
    if room(path) not in ("machine", "cli", "adapter") and path.name != "native.py":
        used = calls_and_attributes(path)
        assert "open()" not in used
        assert not [u for u in used if u.startswith("os.") or u.endswith((".read_text", ".write_text", ".read_bytes", ".open"))]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_file_is_longer_than_one_can_read(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", [p for p in FILES if p.stat().st_size and not name(p).endswith("__main__.py")], ids=name)
def test_every_file_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_suite_itself_stays_readable():
    for path in sorted((ROOT / "test").rglob("*.py")):
        assert len(path.read_text().splitlines()) <= MAX_LINES, name(path)
