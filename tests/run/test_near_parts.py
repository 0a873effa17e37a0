"""Parts of near steps, without processes: what is read of each, and which to blame."""

import zipfile

import numpy as np
import pytest
from attacks import seal
from support import near_parts
from support.helpers import tree_at
from support.near_parts import part, parted

import eqx_ckpt as ec


@pytest.mark.parametrize(
    "rows, read",
    [
        ({0: (0, 2), 1: (4, 6)}, {0: 4, 1: 4}),
        ({3: (6, 0), 1: (4,), 2: (2, 4)}, {3: 4, 1: 2, 2: 2}),
        ({0: (0, 2), 1: (), 2: ()}, {1: 8}),
    ],
)
def test_a_leaf_of_several_parts(rows, read):
    """Each region is read once, of the first part that has it."""
    leaf = parted({number: part(some) for number, some in rows.items()})
    for number, count in read.items():
        assert not leaf.is_complete
        assert near_parts.read_into(leaf, number, rows[number]) == count
    assert leaf.is_complete and np.array_equal(leaf.result().arrays[0], near_parts.X)


def test_a_leaf_is_read_of_parts_that_have_the_same_array():
    """However it is cut into chunks there."""
    same = parted({0: part((0, 2)), 1: part((4, 6), chunk=1)})
    assert list(same.to_come) == [0, 1]
    with pytest.raises(
        RuntimeError, match="parts 0, 1 do not have all of the leaf `w`"
    ):
        parted({0: part((0, 2)), 1: part((4, 6), "int32")})
    for dtypes in (("int32", "float32"), ("float32", "int32")):
        leaf = parted({3: part(dtype=dtypes[0]), 1: part(dtype=dtypes[1])})
        assert list(leaf.to_come) == [3]


def test_which_parts_are_read():
    """Each process reads its own, and one of each other set of shards that it needs:
    one on its disk, if there is one."""
    choose = near_parts.choose
    apart, everyone = [[0], [1], [2], [3]], [[0, 1, 2, 3]] * 4
    assert choose("abcd", apart) == [[0], [1], [2], [3]]
    assert choose("abcd", everyone)[1] == [1, 2, 3, 0]
    assert choose("abab", everyone) == [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert choose("abab", everyone, disks=[[0], [1], [2, 3], [3]])[3] == [3, 2]
    # Other processes than have saved it.
    assert choose("abab", everyone, count=3) == [[0, 1], [1, 2], [2, 3]]
    nobody, disks = [[], [], []], [[1], [0], [0]]
    assert choose("abc", nobody, disks=disks, count=2) == [[1], [0]]
    # A leaf may be whole in some parts alone; and one part could not be read.
    assert choose("abcd", apart, whole="aaba")[2] == [2, 3, 0, 1]
    some = ["a", "b", "c", ""]
    assert choose(some, apart, whole=["a", "a", "a", ""])[0] == [0, 1, 2, 3]


def test_parts_with_the_same_shards_in_another_order():
    """As processes store them whose devices are in another order in the mesh."""
    digest = near_parts.shards_digest
    assert digest((0, 2)) == digest((2, 0)) != digest((0, 4))


def test_the_processes_that_need_a_part():
    """Arrays may be cut along other axes, and their first shards begin at one place."""
    assert near_parts.readers([(4, 8)]) == [0]
    assert near_parts.readers([(8, 4)]) == [0, 1]
    assert near_parts.readers([(4, 8), (8, 4)]) == [0, 1]


def test_a_part_that_cannot_be_read_for_its_report_may_be_later(tmp_path):
    parts = near_parts.parts(tree_at(0), tmp_path / "0.zip")
    assert not parts.report(0, 1).shards_digest and parts.unreadable == {0}
    ec.tree_serialise_leaves(tmp_path / "0.zip", tree_at(3))
    assert parts.load([0])["step"] == 3 and not parts.unreadable


def test_a_part_of_another_library(tmp_path):
    with (tmp_path / "0.zip").open("wb") as f:
        np.savez(f, w=np.array(["x"]), x=np.ones(2))
    parts = near_parts.parts(tree_at(0), tmp_path / "0.zip")
    assert not parts.report(0, 1).shards_digest and parts.unreadable == {0}
    with pytest.raises(ec.DamagedError, match="it is of another library"):
        parts.load([0])


def test_a_part_whose_tree_is_never_saved_is_to_blame(tmp_path):
    """That it has a key of two kinds is seen as `source` asks for it."""
    file, tree = tmp_path / "0.zip", {"x": np.arange(3), "y": np.ones(2)}
    ec.tree_serialise_leaves(file, {"abc": tree})
    whole, index = file.read_bytes(), zipfile.ZipFile(file).read("eqx_ckpt.json")
    forged = seal(index[:-45].replace(b'["kk"', b'["ak"', 1))
    file.write_bytes(whole.replace(index, forged))
    parts = near_parts.parts(tree, file, source=lambda c: c["abc"])
    assert not parts.report(0, 1).shards_digest and parts.unreadable == {0}
    parts = near_parts.parts(tree, file, source=lambda c: c["abc"])
    with pytest.raises(ec.DamagedError, match="keys of two kinds at 'abc'"):
        parts.load([0])
    assert parts.unreadable == {0}
