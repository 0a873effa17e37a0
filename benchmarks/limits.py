"""What a run must keep to on any machine: bytes, files, requests and memory of ours.

Times are only printed: they say as much about the machine.
"""

from typing import Any


PEERS = ("eqx_ckpt", "eqx_ckpt, unverified")

_KIB, _MIB = 2**10, 2**20

# What Python, JAX and TensorStore may allocate by the way: thread stacks, arenas, the
# objects of a tree. A copy of one of the measured trees would be more.
_SLACK = 32 * _MIB


def check(results: dict[str, Any]) -> list[str]:
    """A sentence for each limit that the results exceed; none if all is well."""
    problems: list[str] = []
    for name, result in results["whole"].items():
        leaves, size = result["leaves"], result["bytes"]
        for peer in PEERS:
            where = f"{name}, {peer}"
            limits = _whole(leaves, size, peer == "eqx_ckpt")
            problems += _compare(where, result["peers"].get(peer), limits, size)
    for name, result in results["parts"].items():
        for peer in PEERS:
            where = f"{name}, {peer}"
            limits = _part(result["leaves"], result["bytes"], peer == "eqx_ckpt")
            row = result["peers"].get(peer)
            problems += _compare(where, row, limits, result["bytes"])
    return problems


def _whole(leaves: int, size: int, verified: bool) -> dict[str, float]:
    return {
        # The index, the digests, the nodes, a few side files, and data files of 64 MiB
        # or more, or one for each thread: no file belongs to a leaf.
        "files": 16 + size // (64 * _MIB),
        # A leaf has a name, a place, a digest, its nodes, Orbax's two entries for it,
        # and up to 63 bytes of padding; a large one 16 bytes more for each 4 MiB.
        "disk": size * 1.001 + 512 * leaves + 64 * _KIB,
        # Every byte of the data once, the index, and the digests to verify it.
        "read": size * 1.001 + (128 if verified else 96) * leaves + 64 * _KIB,
        # Small leaves are read in runs, large ones in chunks of MiBs: none by itself.
        "requests": 64 + size // _MIB,
        # A save copies nothing.
        "save_peak": size * 0.05 + _SLACK,
        # A load reads into the memory of the arrays that it returns.
        "load_peak": size * 0.15 + _SLACK,
    }


def _part(leaves: int, size: int, verified: bool) -> dict[str, float]:
    index = 128 * leaves + 64 * _KIB
    # Unverified, what was asked for. Verified, also the rest of the blocks of up to
    # 4 MiB that its two ends lie in, as a digest is of a whole block.
    return {"read": index + (size + 8 * _MIB if verified else size * 1.1)}


def _compare(
    where: str, row: dict[str, Any] | None, limits: dict[str, float], least: int
) -> list[str]:
    if row is None:
        return [f"{where}: it was not measured."]
    if "error" in row:
        return [f"{where}: {row['error']}"]
    problems = [
        f"{where}: `{key}` is {row[key]:,}, and the limit is {limit:,.0f}."
        for key, limit in limits.items()
        if row[key] > limit
    ]
    if row["read"] < least:
        # Then the limit on what is read would say nothing.
        problems.append(
            f"{where}: only {row['read']:,} bytes of {least:,} were seen being read: "
            "they come another way, which `counters.reads` does not count."
        )
    return problems
