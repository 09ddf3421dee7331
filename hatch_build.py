"""Compiles the native part of the package where it is built or installed; see `compiling`.

Without a compiler the package is built all the same, and moves its bytes by the interpreter.
"""

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_LIBRARY = "tierstore/native/libextent_io.so"


class NativeBuildHook(BuildHookInterface[Any]):
    """Puts the shared library into the wheel, or beside its source for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; called before a wheel is made, `version` is `standard` or `editable`."""
        room = Path(self.root, "tierstore", "native")
        why = runpy.run_path(str(room / "compiling.py"))["compile_library"]()
        if why:
            self.app.display_warning(f"tierstore will move bytes by the interpreter: {why}")
            return
        if version == "standard":
            build_data["artifacts"].append(f"/{_LIBRARY}")
        # No Python is linked: one library serves all of them.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
