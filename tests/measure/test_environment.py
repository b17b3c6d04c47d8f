"""The environment of a measurement: plain values, found without importing anything heavy."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from headrace.measure.environment import capture_environment, cpu_model, git_state, installed_version


def test_it_is_json_and_counts_only_the_processors_we_may_use():
    environment = capture_environment()
    document = json.loads(json.dumps(dataclasses.asdict(environment)))
    assert document["num_cores"] >= len(document["affinity"]) >= 1
    assert document["python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert document["numpy"] == installed_version("numpy")


def test_versions_are_read_without_importing_the_packages():
    code = (
        "import sys; from headrace.measure.environment import capture_environment as c; e = c();"
        "assert e.numpy, e; assert not {'torch', 'transformers'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_not_installed_is_none():
    assert installed_version("no-such-distribution-of-this-name") is None


def test_arm_processors_have_numbers_instead_of_names(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nCPU implementer\t: 0x48\nCPU part\t: 0xd01\n")
    assert cpu_model(cpuinfo).endswith("implementer 0x48 part 0xd01")
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Another\n")
    assert cpu_model(cpuinfo) == "Some CPU @ 2 GHz"
    assert cpu_model(tmp_path / "absent")


def git(directory: Path, *arguments: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run(["git", "-C", str(directory), *who, *arguments], check=True, capture_output=True)


def test_commit_and_dirtiness_of_a_checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "tracked").write_text("1")
    git(tmp_path, "add", "tracked")
    git(tmp_path, "commit", "-qm", "one")
    commit, dirty = git_state(tmp_path)
    assert len(commit) == 40
    assert dirty is False
    (tmp_path / "tracked").write_text("2")
    assert git_state(tmp_path) == (commit, True)


def test_a_package_installed_inside_somebodys_repository_is_not_a_checkout_of_it(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "tracked").write_text("1")
    git(tmp_path, "add", "tracked")
    git(tmp_path, "commit", "-qm", "one")
    installed = tmp_path / "venv" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "module.py").write_text("")
    assert git_state(installed) == (None, None)
    assert git_state(tmp_path / "absent") == (None, None)
