"""Device maps: short, exact for one process, and never a guess for several ranks."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from limpet.layout.devices import find_device, make_device_map, merge_device_maps

DEVICES = st.sampled_from(["cpu", "cuda:0", "cuda:1", "xpu:0"])
KEYS = st.text(st.sampled_from("ab./*~"), min_size=1, max_size=8) | st.just("x" + ".y" * 100)


def adam(count, device="cuda:0", prefix="layers"):
    """The leaves of a model and of Adam, whose step counters are on the CPU."""
    devices = {f"model/{prefix}.{i}.weight": device for i in range(count)}
    for i in range(count):
        slots = f"optimizer/state/model.{prefix}.{i}.weight"
        devices |= {f"{slots}/step": "cpu"}
        devices |= {f"{slots}/{name}": device for name in ("exp_avg", "exp_avg_sq")}
    return devices


@given(st.dictionaries(KEYS, DEVICES))
def test_every_tensor_is_found_on_its_device(devices):
    made = make_device_map(devices)
    for key, device in devices.items():
        # parts after the last separate one are one part, so a prefix cannot shadow a longer key
        assert find_device(made, key) == device


@given(st.lists(st.dictionaries(KEYS, DEVICES), max_size=4))
def test_a_merged_map_has_the_device_the_type_or_nothing(ranks):
    merged = merge_device_maps([make_device_map(devices) for devices in ranks])
    for devices in ranks:
        for key, device in devices.items():
            assert find_device(merged, key) in (device, device.partition(":")[0], None)


def test_ranks_with_one_structure_lose_only_the_index():
    merged = merge_device_maps([make_device_map(adam(3, f"cuda:{rank}")) for rank in range(8)])
    for key, device in adam(3, "cuda").items():
        assert find_device(merged, key) == device
    assert merge_device_maps(["cuda:0"] * 4) == "cuda:0"
    assert merge_device_maps([f"cuda:{rank}" for rank in range(8)] * 16) == "cuda"
    assert merge_device_maps([None, "cuda:1", None]) == "cuda:1"
    assert merge_device_maps(["cpu", "cuda:0"]) is merge_device_maps([None]) is None


def test_ranks_with_other_types_of_devices_are_unknown_only_where_they_differ():
    first = make_device_map({"m/a": "cpu", "m/b": "cuda:0"})
    second = make_device_map({"m/a": "cuda:0", "m/b": "cuda:0", "m/c": "cpu"})
    merged = merge_device_maps([first, second])
    assert find_device(merged, "m/a") is None
    assert find_device(merged, "m/b") == "cuda:0"
    assert find_device(merged, "m/c") == "cpu"


def test_the_size_of_a_map_does_not_depend_on_the_number_of_tensors():
    assert make_device_map({f"k{i}": "cuda:3" for i in range(10_000)}) == "cuda:3"
    sizes = [len(msgspec.json.encode(make_device_map(adam(n)))) for n in (10, 1000)]
    assert sizes[0] == sizes[1] < 250
    # 40 layers of 25 tensors on two devices: an entry for each layer, not for each tensor
    layers = {f"m/l.{i}.w{j}": f"cuda:{i % 2}" for i in range(40) for j in range(25)}
    assert len(msgspec.json.encode(make_device_map(layers))) < 500


def test_an_invalid_map_is_unknown():
    for invalid in (3, [], {"/a": 3}, {"*": {"*": []}}, {"/a": {"": None}}, None, True):
        assert find_device(invalid, "a") is None
