"""The command line. It imports every room. Begin with `_main`."""
