"""How much memory a process may have: as its control groups say."""

import pytest
from support import inside


@pytest.mark.parametrize(
    "groups, files, limits",
    [
        ("0::/", {"memory.max": "1000"}, [1000]),
        ("0::/a/b", {"memory.max": "max", "a/memory.max": "70"}, [70]),
        (
            "5:cpu:/x\n4:memory:/docker/id",
            {"memory/memory.limit_in_bytes": "90"},
            [90],
        ),
        ("0::/", {}, []),
    ],
)
def test_limits_of_control_groups(tmp_path, groups, files, limits):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert inside.limits_of_memory(tmp_path) == limits
