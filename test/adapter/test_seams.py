"""The table of seams holds on the installed SGLang, and a seam that does not hold is named."""

import pytest
from sglang_kvdrive.adapter import seams
from sglang_kvdrive.adapter.seams import Seam

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang warns while it is imported


@pytest.mark.sglang
@pytest.mark.slow
def test_every_seam_holds_on_the_installed_sglang():
    from sglang.srt.plugins import load_plugins

    load_plugins()
    results = seams.check_seams()
    assert [result for result in results if not result.ok] == []
    assert results[0].detail == seams.SGLANG_VERSION
    assert len(results) == len(seams.SEAMS) + 1


def test_no_seam_is_listed_twice_and_each_says_why():
    assert len({seam.target for seam in seams.SEAMS}) == len(seams.SEAMS)
    assert all(seam.why and seam.kind in ("hook", "registry", "subclass", "call") for seam in seams.SEAMS)


@pytest.mark.parametrize(
    ("seam", "fault"),
    [
        (Seam("json.no_such_name", "hook", "x"), "not found"),
        (Seam("no_such_module.name", "hook", "x"), "not found"),
        (Seam("textwrap.shorten", "hook", "x", ("text", "length")), "expected it to begin with (text, length)"),
        (Seam("textwrap.shorten", "hook", "x", ("text",)), "new parameter without a default: width"),
        (Seam("json.JSONDecoder", "hook", "x", attributes=("decode", "undo")), "has no attribute undo"),
        (Seam("json.JSONDecoder", "hook", "x", attributes=("fields:decode",)), "has no field decode"),
    ],
)
def test_a_broken_seam_says_what_is_wrong_and_what_needs_it(seam, fault):
    result = seams._check(seam)
    assert not result.ok
    assert fault in result.detail
    assert "needed for: x" in result.detail


def test_a_seam_that_holds_tells_its_purpose():
    assert seams._check(Seam("textwrap.shorten", "hook", "short texts", ("text", "width"))).detail == "short texts"


def test_another_sglang_version_is_refused_with_the_command_that_helps(monkeypatch):
    monkeypatch.setattr(seams, "version", lambda _name: "0.5.22")
    result = seams._check_version()
    assert not result.ok
    assert result.detail == "found 0.5.22, needs exactly 0.5.23: pip install sglang==0.5.23"
