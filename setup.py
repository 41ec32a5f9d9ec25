"""What ``setup.cfg`` cannot say: ``hvd_autosync.pth`` goes beside the package, not into it.

It is a step of ``build``, so that wheels and editable installs both have it (``data_files`` reach
wheels only). Installers record the file like any other, so uninstalling removes it.
"""

import shutil
from pathlib import Path
from typing import ClassVar

import setuptools
from setuptools.command.build import build

PTH = "hvd_autosync.pth"


class Build(build):
    """setuptools' own steps and one more, in an empty folder.

    An earlier build in the same checkout may have left modules there that are no more.
    """

    sub_commands: ClassVar = [*build.sub_commands, ("build_pth", None)]

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildPth(setuptools.Command):
    """Copies the ``.pth`` file to the root of what becomes site-packages.

    The attributes and methods are those of ``setuptools.command.build.SubCommand``.
    """

    description = f"copy {PTH}"
    user_options: ClassVar = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        # In an editable install build_lib is thrown away, and the wheel's root is install_lib.
        install = self.get_finalized_command("install")
        folder = Path(install.install_lib if self.editable_mode else self.build_lib)
        folder.mkdir(parents=True, exist_ok=True)
        self.copy_file(PTH, str(folder / PTH))

    def get_source_files(self) -> list[str]:
        return [PTH]

    def get_outputs(self) -> list[str]:
        return [] if self.editable_mode else [f"{self.build_lib}/{PTH}"]

    def get_output_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self.get_outputs(), PTH)


setuptools.setup(cmdclass={"build": Build, "build_pth": BuildPth})
