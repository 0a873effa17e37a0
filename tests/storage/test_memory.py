"""How much of the machine a process may have: as its control groups say."""

import os

import pytest
from support import inside


@pytest.mark.parametrize(
    "groups, files, memory, cores",
    [
        ("0::/", {"memory.max": "1000", "cpu.max": "100000 100000"}, 1000, 1),
        ("0::/a/b", {"memory.max": "max", "a/memory.max": "70"}, 70, None),
        ("0::/a/b", {"cpu.max": "max 100000", "a/b/cpu.max": "5 10"}, None, 1),
        (
            "5:cpu,cpuacct:/x\n4:memory:/docker/id",
            {
                "memory/memory.limit_in_bytes": "90",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/x/cpu.cfs_quota_us": "40000",
                "cpu/cpu.cfs_period_us": "100000",
                "cpu/x/cpu.cfs_period_us": "50000",
            },
            90,
            1,
        ),
        # Without a limit, and with some that are more than the machine has.
        ("0::/", {}, None, None),
        ("0::/", {"memory.max": str(2**62), "cpu.max": "9999999 1"}, None, None),
    ],
)
def test_limits_of_control_groups(tmp_path, groups, files, memory, cores):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    may_use = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    found = inside.share_of_machine(tmp_path)
    assert found == (memory or has, cores or may_use or os.cpu_count())
