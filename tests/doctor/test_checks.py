from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from hvd_autosync.commands.doctor import check_variables
from hvd_autosync.doctor import checks as doctor
from hvd_autosync.doctor.finding import Finding, Severity
from hvd_autosync.errors import HorovodBuildError
from hvd_autosync.launch import facts
from hvd_autosync.search_space import HorovodBuild
from hvd_autosync.util import patches, private_names
from hvd_autosync.util.patches import PATCHES, Patch
from hvd_autosync.util.private_names import PrivateNames


def build(monkeypatch: pytest.MonkeyPatch, version: str = "0.28.1", **offers: bool) -> None:
    """A build; as of the real one, its MPI counts only with an ``mpirun``."""
    made = HorovodBuild(version, **{"gloo": False, "mpi": False, **offers})
    monkeypatch.setattr(facts, "mpi_built", lambda: made.mpi)
    usable = replace(made, mpi=made.mpi and facts._has_mpirun())
    monkeypatch.setattr(facts, "horovod_build", lambda: usable)


def program(folder: Path, name: str, script: str) -> Path:
    """An executable shell script."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def severities(checks: list[Finding]) -> list[tuple[str, str]]:
    return [(check.subject, check.severity.value) for check in checks]


def test_versions_name_what_the_numbers_depend_on() -> None:
    check = doctor.check_versions()
    assert check.severity is Severity.OK
    assert "horovod 0.28" in check.text and "torch " in check.text and "botorch " in check.text


def test_a_missing_library_fails_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "versions", lambda: {"python": "3.11", "torch": "2.1"})
    check = doctor.check_versions()
    assert check.severity is Severity.FAIL
    assert check.remedy == "Run pip install botorch gpytorch."


def test_a_newer_torch_than_was_tested_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_names, "TESTED_VERSIONS", {"torch": "2.0.1"})
    check = doctor.check_versions()
    assert check.severity is Severity.WARN
    assert check.text.endswith("; the newest torch that was tested is 2.13.0")
    assert check.remedy.endswith("install torch 2.13.0.")


def test_every_private_name_exists() -> None:
    assert doctor.check_private_names() == Finding(
        "private names", Severity.OK, "all that are used exist"
    )


def test_a_missing_private_name_fails_with_the_tested_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = (
        PrivateNames("torch._C", "_gone", ("runtime/current.py",), "to test it"),
        PrivateNames("horovod.torch.mpi_ops", "rank _gone", ("torch.py",), "to test it too"),
    )
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", rows)
    assert doctor.check_private_names() == Finding(
        "private names",
        Severity.FAIL,
        "missing: torch._C._gone (to test it; runtime/current.py); "
        "horovod.torch.mpi_ops._gone (to test it too; torch.py)",
        "Install horovod 0.28.1 and torch 2.13.0, the tested versions.",
    )


def test_a_missing_private_name_of_python_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    row = PrivateNames("argparse.ArgumentParser", "_gone", ("engine/job_line.py",), "to test it")
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", (row,))
    check = doctor.check_private_names()
    assert (check.severity, check.remedy) == (
        Severity.WARN,
        "Use an older Python, and report the output of hvd-autosync doctor --json.",
    )


def test_every_target_of_a_patch_exists() -> None:
    check = doctor.check_patches()
    assert check.severity is Severity.OK and str(len(PATCHES)) in check.text


def test_a_missing_target_fails_with_the_tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (Patch("p", "torch.nn.gone torch.nn.Module", "runtime/current.py", "to test it"),)
    monkeypatch.setattr(patches, "PATCHES", rows)
    assert doctor.check_patches() == Finding(
        "patches",
        Severity.FAIL,
        "cannot be replaced, as they are missing: torch.nn.gone (to test it; runtime/current.py)",
        "Install torch 2.13.0, the tested version.",
    )


def test_the_table_of_patches_compares_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row["name"] for row in doctor.patch_table()] == [patch.name for patch in PATCHES]
    here = {package: version(package) for patch in PATCHES for package in patch.packages}
    monkeypatch.setattr(patches, "TESTED_VERSIONS", here)
    assert {row["here"] for row in doctor.patch_table()} == {"tested"}
    monkeypatch.setattr(patches, "TESTED_VERSIONS", {**here, "torch": "2.0.0"})
    rows = {row["name"]: row for row in doctor.patch_table()}
    assert rows["losses"]["used_in"] == "runtime/patches/backward.py"
    assert rows["losses"]["here"] == "newer than tested"
    assert rows["losses"]["targets"] == (
        "torch.autograd.backward, torch.amp.GradScaler.scale, torch.amp.GradScaler.update"
    )
    assert rows["seeds"]["tested"] == "numpy 2.4.6, torch 2.13.0"
    assert rows["seeds"]["here"] == "numpy: tested, torch: newer than tested"


def test_the_build_and_its_controllers(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, gloo=True)
    checks = list(doctor.check_horovod())
    assert severities(checks) == [("Horovod", "ok"), ("controller", "ok")]
    assert checks[0].text == "0.28.1 with Gloo"


@pytest.mark.parametrize("error", ["OSError", "RuntimeError", "ImportError"])
def test_a_torch_that_fails_while_it_is_imported_is_a_finding(tmp_path: Path, error: str) -> None:
    (tmp_path / "torch").mkdir()
    said = "libcudart.so.12: cannot open shared object file"
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {error}({said!r})")
    look = "from hvd_autosync.doctor.checks import check_horovod as look; print(*look(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", look],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "FAIL" in done.stdout and said in done.stdout and "import torch" in done.stdout


def test_a_horovod_that_cannot_be_imported_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> HorovodBuild:
        raise HorovodBuildError("horovod.torch cannot be imported", hint="Install it.")

    monkeypatch.setattr(facts, "horovod_build", missing)
    (check,) = doctor.check_horovod()
    assert (check.severity, check.remedy) == (Severity.FAIL, "Install it.")


def test_another_horovod_is_a_warning_and_none_without_controller_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build(monkeypatch, version="0.27.0")
    assert severities(list(doctor.check_horovod())) == [("Horovod", "warn"), ("controller", "fail")]


@pytest.mark.parametrize(("gloo", "severity"), [(True, Severity.WARN), (False, Severity.FAIL)])
def test_mpi_without_mpirun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gloo: bool, severity: Severity
) -> None:
    build(monkeypatch, gloo=gloo, mpi=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    check = list(doctor.check_horovod())[-1]
    assert check.severity is severity
    assert "no mpirun" in check.text and "--gloo" in check.remedy


def test_open_mpi_5_is_fine_because_the_plugin_supplies_its_binding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build(monkeypatch, gloo=True, mpi=True)
    program(tmp_path, "mpirun", 'echo "mpirun (Open MPI) 5.0.11"')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "open_mpi_major", lambda: 5)
    check = list(doctor.check_horovod())[-1]
    assert check.severity is Severity.OK
    assert "mpirun (Open MPI) 5.0.11" in check.text and "-bind-to" in check.text
    assert "--binding-args=--bind-to none --map-by slot" in check.remedy


def test_another_mpi_needs_no_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build(monkeypatch, mpi=True)
    program(tmp_path, "mpirun", 'echo "HYDRA build details: 4.1"')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "open_mpi_major", lambda: None)
    check = list(doctor.check_horovod())[-1]
    assert (check.severity, check.remedy) == (Severity.OK, "")
    assert "HYDRA" in check.text


def test_a_plugin_that_is_switched_off_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_AUTOSYNC_DISABLE", "1")
    check = doctor.check_plugin()
    assert (check.severity, check.remedy) == (Severity.FAIL, "Unset HVD_AUTOSYNC_DISABLE.")
    monkeypatch.setenv("HVD_AUTOSYNC_DISABLE", "off")
    monkeypatch.setattr(doctor, "_knows_autosync", lambda launcher: True)
    assert doctor.check_plugin().text.startswith("active")


def test_the_horovodrun_on_the_path_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = program(tmp_path, "horovodrun", 'echo "  --autosync-trials N"')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    check = doctor.check_plugin()
    assert (check.severity, check.text) == (Severity.OK, f"active: {file} has --autosync")


def test_a_horovodrun_of_another_python_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(tmp_path / "other", "horovodrun", "echo usage")
    program(tmp_path / "own", "horovodrun", 'echo "  --autosync-trials N"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'other'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
    check = doctor.check_plugin()
    assert check.severity is Severity.FAIL
    assert "belongs to another Python" in check.text
    assert check.remedy == f"Put {tmp_path / 'own'} first on the PATH."


@pytest.mark.parametrize("installed", [True, False])
def test_a_plugin_that_is_not_active_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: bool
) -> None:
    program(tmp_path, "horovodrun", "echo usage")
    if installed:
        (tmp_path / "hvd_autosync.pth").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    check = doctor.check_plugin()
    assert check.severity is Severity.FAIL
    assert ("--help" in check.remedy) is installed
    assert ("pip install" in check.remedy) is not installed


def test_without_a_horovodrun_on_the_path_the_module_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[str]] = []

    def output(command: list[str]) -> str:
        asked.append(command)
        return "--autosync-trials"

    monkeypatch.setattr(doctor, "_output", output)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor.check_plugin()
    assert check.severity is Severity.WARN and "PATH" in check.remedy
    assert asked == [[sys.executable, "-m", "horovod.runner.launch", "--help"]]


def test_a_store_is_opened_for_writing(tmp_path: Path) -> None:
    check = doctor.check_store(str(tmp_path / "traces.db"))
    assert (check.severity, check.text) == (Severity.OK, f"{tmp_path / 'traces.db'} is writable")


def test_a_store_that_cannot_be_written_fails(tmp_path: Path) -> None:
    from hvd_autosync.traces import TraceStore

    (tmp_path / "note.txt").write_text("not a database, but a note of some length")
    assert doctor.check_store(str(tmp_path / "note.txt")).severity is Severity.FAIL

    file = tmp_path / "traces.db"
    TraceStore(file)
    check = doctor.check_store(f"sqlite:///file:{file}?mode=ro&uri=true")
    assert check.severity is Severity.FAIL
    assert "readonly" in check.text and "writable" in check.remedy
    assert not TraceStore(file).studies()


@pytest.mark.parametrize(
    ("cores", "given", "severity"),
    [
        (1, None, "ok"),
        (8, None, "warn"),
        (8, "4", "ok"),
        (8, "4,2", "ok"),
        (8, "16", "warn"),
        (8, "²", "ok"),
    ],
)
def test_threads_must_fit_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: str | None, severity: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    check = doctor.check_threads()
    assert check.severity.value == severity
    assert ("OMP_NUM_THREADS=8/RANKS-PER-HOST" in check.remedy) is (severity == "warn")


@pytest.mark.parametrize(
    ("name", "value", "text", "remedy"),
    [
        ("TRIALS", "0", "invalid value '0' for HVD_AUTOSYNC_TRIALS", "Maximum number of trials"),
        ("TRAILS", "3", "unknown environment variable HVD_AUTOSYNC_TRAILS", "HVD_AUTOSYNC_TRIALS?"),
        ("SPACE", "/none.toml", "the space file '/none.toml' cannot be read", "Check its path."),
        ("LOG", "loud", "HVD_AUTOSYNC_LOG is 'loud'", "Choose one"),
        ("EXTENSIONS", "/none.py", "cannot load '/none.py', which HVD_AUTOSYNC_EXT", "List Python"),
    ],
)
def test_variables_that_no_job_could_use_fail(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str, remedy: str
) -> None:
    monkeypatch.setenv(f"HVD_AUTOSYNC_{name}", value)
    check = check_variables()
    assert (check.subject, check.severity) == ("variables", Severity.FAIL)
    assert check.text.startswith(text) and remedy in check.remedy


def test_a_space_file_that_needs_an_option_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command line may have the option."""
    (tmp_path / "space.toml").write_text('[knobs.large_codec]\nfixed = "int8"\n')
    monkeypatch.setenv("HVD_AUTOSYNC_SPACE", str(tmp_path / "space.toml"))
    check = check_variables()
    assert check.severity is Severity.WARN and "--autosync-allow codec" in check.remedy
    monkeypatch.setenv("HVD_AUTOSYNC_ALLOW", "codec")
    assert check_variables().severity is Severity.OK


def test_variables_are_named_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HVD_AUTOSYNC_")]:
        monkeypatch.delenv(name)
    assert check_variables() == Finding("variables", Severity.OK, "none is set")
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", "postgresql://u:secret@db/x")
    assert check_variables() == Finding("variables", Severity.OK, "valid: HVD_AUTOSYNC_STORE")


def test_a_whole_examination_of_this_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("HVD_AUTOSYNC_DISABLE", raising=False)
    checks = list(doctor.examine(store=str(tmp_path / "traces.db")))
    found = {check.subject: check.severity.value for check in checks}
    assert found["versions"] == found["Horovod"] == found["store"] == "ok"
    assert found["private names"] == "ok"
    assert found["plugin"] == "ok", [check.text for check in checks]
    assert all(check.remedy for check in checks if check.severity is not Severity.OK)
