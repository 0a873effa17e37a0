"""Lists what PyInstaller does not see, for the programs that it packs."""

from PyInstaller.utils.hooks import (  # pyright: ignore
    collect_data_files,
    collect_submodules,
    copy_metadata,
)


# Stores and commands are imported by names, when they are first asked for.
hiddenimports = collect_submodules("eqx_ckpt")
# The files of the page; and the version of TensorStore, which saves record.
datas = [*collect_data_files("eqx_ckpt"), *copy_metadata("tensorstore")]
