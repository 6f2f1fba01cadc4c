from __future__ import annotations

import dataclasses

from kvcache.identity import NAMESPACE_ID_BYTES, Namespace
from tests.unit.kvcache.examples import LAYOUT, NAMESPACE


def test_differences_name_each_field_with_both_values() -> None:
    other = dataclasses.replace(NAMESPACE, block_size=64, hash_root="ff")
    assert NAMESPACE.differences(other) == (
        "block_size: 32 here, 64 there",
        f"hash_root: {NAMESPACE.hash_root} here, ff there",
    )
    assert NAMESPACE.differences(NAMESPACE) == ()


def test_the_id_differs_with_any_field() -> None:
    ids = {NAMESPACE.id}
    for field in dataclasses.fields(NAMESPACE):
        values = dataclasses.asdict(NAMESPACE)
        values[field.name] = 64 if field.name == "block_size" else "other"
        ids.add(Namespace(**values).id)
    assert len(ids) == 1 + len(dataclasses.fields(NAMESPACE))
    assert {len(one) for one in ids} == {NAMESPACE_ID_BYTES}


def test_the_id_does_not_mistake_where_one_field_ends() -> None:
    one = dataclasses.replace(NAMESPACE, model="ab", revision="c")
    other = dataclasses.replace(NAMESPACE, model="a", revision="bc")
    assert one.id != other.id


def test_a_layout_of_another_instruction_set_differs() -> None:
    other = dataclasses.replace(LAYOUT, isa="avx512", head_range=(0, 1))
    assert LAYOUT.differences(other) == (
        "head_range: (0, 3) here, (0, 1) there",
        "isa: avx2 here, avx512 there",
    )
