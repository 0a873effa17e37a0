"""Where PyInstaller finds what it has to know: it looks at entry points."""

import pathlib


def hook_directories() -> list[str]:
    return [str(pathlib.Path(__file__).parent)]
