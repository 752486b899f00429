from hypothesis import given
from hypothesis import strategies as st
from tim_trace.schemas.documents import canonical_json, contract_hash, differences

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), values, max_size=6))
def test_the_order_of_settings_does_not_change_the_hash(contract):
    assert contract_hash(contract) == contract_hash(dict(reversed(contract.items())))


def test_every_setting_changes_the_hash():
    contract = {"dtype": "bfloat16", "torch": {"num_threads": 2}}
    assert contract_hash(contract) != contract_hash({"dtype": "bfloat16", "torch": {"num_threads": 3}})


def test_the_hash_stays_the_same_from_release_to_release():
    # printf '{"dtype":"float32","engine":"trl"}' | sha256sum
    assert contract_hash({"dtype": "float32", "engine": "trl"}) == (
        "5050e788ed3e3e2c0431be1c00e505649f007e656e62ea33153b72392b48f036"
    )


def test_what_json_cannot_say_becomes_text():
    assert canonical_json({"a": float("inf"), "b": {3, 1}, "c": object}) == (
        '{"a":"inf","b":[1,3],"c":"<class \'object\'>"}'
    )


def test_settings_that_were_not_recorded_are_counted():
    recorded, now = (
        {"dtype": "float32", "torch": {"tf32": None}},
        {"dtype": "bfloat16", "torch": {"tf32": True}, "device": "cpu"},
    )
    changed = "dtype: recorded float32, now bfloat16"
    assert [*differences(recorded, now)] == [changed, "2 settings were not recorded"]
    assert [*differences(recorded, now | {"torch": {}})] == [changed, "one setting was not recorded"]
