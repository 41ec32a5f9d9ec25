"""The tool that builds Horovod: everything but the minutes of compiling."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module ``horovod_wheel``."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import horovod_wheel

    return horovod_wheel


@pytest.fixture
def builds(wheels: ModuleType) -> ModuleType:
    """The module ``horovod_build``."""
    return sys.modules["horovod_build"]


def parts(wheels: ModuleType, **gpu: Path) -> object:
    """A build for some torch, without MPI."""
    return wheels.Parts("2.13.0+cpu", **gpu)


def test_compiler_gets_cxx17_and_linker_a_relative_path(builds: ModuleType, tmp_path: Path) -> None:
    wrapper = tmp_path / "c++17"
    wrapper.write_text(builds.CXX_WRAPPER.replace("{compiler}", "printf '%s\\n'"))
    arguments = ["-std=c++14", "-std=gnu++11", "-std=c++17", "-shared", "-DNAME=two words", "a.o"]
    done = subprocess.run(["sh", str(wrapper), *arguments], text=True, capture_output=True)
    *words, rpath = done.stdout.splitlines()
    headers, words = words[:12], words[12:]
    assert headers[::2] == ["-include"] * 6
    assert {"cstdint", "stdexcept", "string"} < {*headers[1::2]}
    assert words == ["-std=c++17", "-std=gnu++17", "-std=c++17", *arguments[3:]]
    assert rpath == "-Wl,-rpath,$ORIGIN/../../../..:$ORIGIN/../../torch/lib"


def test_identity_names_what_the_build_depends_on(wheels: ModuleType, tmp_path: Path) -> None:
    identity = wheels.identity_of(parts(wheels))
    assert identity.startswith("horovod-0.28.1_torch-2.13.0+cpu_cpython-")
    assert "_no-mpi_cpu_" in identity
    nccl = fake_nccl(tmp_path)
    assert "_cuda-by-host_" in wheels.identity_of(parts(wheels, cuda=tmp_path))
    assert "_nccl-2.27.5_" in wheels.identity_of(parts(wheels, cuda=tmp_path, nccl=nccl))


def fake_nccl(folder: Path) -> Path:
    """NCCL as pip installs it: without the plain name of the library."""
    (folder / "include").mkdir()
    (folder / "include" / "nccl.h").write_text(
        "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 5\n"
    )
    (folder / "lib").mkdir()
    (folder / "lib" / "libnccl.so.2").touch()
    return folder


def test_nccl_is_used_where_nvcc_and_headers_are(
    wheels: ModuleType,
    builds: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cuda, home, scratch = tmp_path / "cuda", tmp_path / "nccl", tmp_path / "scratch"
    for folder in (cuda / "bin", home, scratch):
        folder.mkdir(parents=True)
    (cuda / "bin" / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert wheels.find_cuda() is None
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(cuda))
    assert wheels.find_cuda() == cuda
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(home))
    assert wheels.find_nccl() is None
    assert "no NCCL headers" in capsys.readouterr().out

    fake_nccl(home)
    assert wheels.find_nccl() == home
    settings = builds.nccl_environment(scratch, home)
    assert settings["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    library = Path(settings["HOROVOD_NCCL_LIB"], "libnccl.so")
    assert library.resolve() == (home / "lib" / "libnccl.so.2").resolve()


@pytest.mark.parametrize("cached", [False, True])
def test_cached_wheel_that_fails_is_built_again(
    cached: bool,
    wheels: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if cached:
        (tmp_path / "horovod-old.whl").touch()
    installed = []

    def build(folder: Path, _: object) -> Path:
        return folder / "horovod-new.whl"

    def install(wheel: Path, _: object) -> str | None:
        installed.append(wheel.name)
        return "it lacks gloo" if wheel.name == "horovod-old.whl" else None

    monkeypatch.setattr(wheels, "build", build)
    monkeypatch.setattr(wheels, "install", install)
    wheels.provide(tmp_path, parts(wheels))
    assert installed == ["horovod-old.whl"] * cached + ["horovod-new.whl"]
    assert ("built again (it lacks gloo)" in capsys.readouterr().out) == cached
    assert not (tmp_path / "horovod-old.whl").exists()


def test_second_process_waits_for_the_first(wheels: ModuleType, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(TOOLS)!r}); import horovod_wheel, pathlib\n"
        f"with horovod_wheel.alone(pathlib.Path({str(tmp_path / 'lock')!r})): print('in')"
    )
    with wheels.alone(tmp_path / "lock"):
        second = subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE)
        assert second.stdout is not None
        assert second.stdout.readline().startswith("waiting for the process that builds")
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(0.5)
    output, _ = second.communicate(timeout=280)
    assert output == "in\n"


def test_failed_build_shows_its_first_error(builds: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("fine\n" * 50 + "a.cc:3:1: error: wrong\n" + "noise\n" * 50)
    shown = builds.first_error(log)
    assert "a.cc:3:1: error: wrong\n" in shown
    assert len(shown.splitlines()) < 20


@pytest.mark.parametrize(
    ("compiler", "complaint"), [("/nonexistent/c++", "does not exist"), ("false", "cannot compile")]
)
def test_missing_or_old_compiler_is_named(
    builds: ModuleType, compiler: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(SystemExit, match=complaint):
        builds.find_compiler()


def test_missing_python_headers_are_named(
    builds: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(SystemExit, match=sysconfig.get_path("include")):
        builds.find_compiler()
