"""Where the package does not work. It is the first module that is imported."""

import os
import sys


if sys.platform == "win32":
    raise ImportError(
        "eqx_ckpt works on Linux and on macOS, and not on Windows. Install it in the "
        "Windows Subsystem for Linux (`wsl --install`)."
    )
if sys.platform == "darwin" and os.uname().machine == "x86_64":
    raise ImportError(
        "eqx_ckpt works on Macs with Apple's processor: JAX has no wheels for Intel's "
        "since version 0.5. If this Mac has Apple's, install a Python for arm64."
    )
