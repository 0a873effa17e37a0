"""Where the package does not work. It is the first module that is imported."""

import sys


if sys.platform == "win32":
    raise ImportError(
        "eqx_ckpt works on Linux and on macOS, and not on Windows. Install it in the "
        "Windows Subsystem for Linux (`wsl --install`)."
    )
