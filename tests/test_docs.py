import re
import sys

import pytest
from builders import ROOT, run
from tim_trace import cli
from tim_trace.schemas.layout import FOLDERS
from tim_trace.tracer.importers.neutral import KNOWN

README = (ROOT / "README.md").read_text()
FORMAT = (ROOT / "docs" / "trace-format.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]


def test_the_generated_parts_are_fresh():
    done = run(sys.executable, ROOT / "docs" / "generate.py", "--check")
    assert done.code == 0, done.stderr


def test_every_command_is_in_the_readme():
    for name in cli.main.commands:
        assert f"tim-trace {name}" in README


def test_every_folder_of_a_trace_and_every_column_to_import_is_documented():
    for name in FOLDERS:
        assert re.search(rf"^  {name}/", FORMAT, re.MULTILINE), name
    for name in KNOWN:
        assert f"`{name}`" in FORMAT, name


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_folder_of_the_repository_is_in_the_readme_s_tree():
    tracked = run("git", "ls-files", cwd=ROOT).stdout.splitlines()
    folders = {name.partition("/")[0] for name in tracked if "/" in name and not name.startswith(".")}
    assert folders
    for name in folders:
        assert re.search(rf"^{name}/", README, re.MULTILINE), name


def fences(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", fences("python"))
def test_python_in_the_readme_runs(code, tmp_path):
    (tmp_path / "readme.py").write_text(code)
    done = run(sys.executable, "-W", "error", tmp_path / "readme.py", cwd=tmp_path)
    assert done.code == 0, done.stderr
