"""`python -m eqx_ckpt`: see `_cli`."""

from ._cli._main import script


if __name__ == "__main__":
    script()
