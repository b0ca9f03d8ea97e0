"""Clusters: names and files resolve to the right devices, a written file reads back equal, and errors are one line."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace
from inspect import signature

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.base.config.reader import build_dataclass
from meshwright.base.hardware import cluster as cluster_module
from meshwright.base.hardware.cluster import (
    GB,
    NETWORK_400G,
    NODE_TYPES,
    NVLINK_5,
    PCIE_5_HOST,
    TERA,
    BandwidthCurve,
    MatmulRate,
    node_type,
    peak_rates,
    preset_cluster,
    sustained,
)
from meshwright.base.hardware.cluster_file import ClusterSchema, build_cluster, cluster_toml, read_cluster
from meshwright.base.hardware.resolve_cluster import machine_file, resolve_cluster
from meshwright.errors import ConfigError
from meshwright.planner.calibration.run_prediction import device_preset
from meshwright.planner.search.plan_result import make_plan
from meshwright.planner.workload.workload_args import build_workload

CUSTOM = """
nodes = 4
devices_per_node = 2
[device]
memory_gb = 10
memory_bandwidth_gbs = 100
peak_tflops = {bf16 = 5}
[intra_node]
bandwidth_gbs = 20
[inter_node]
bandwidth_gbs = 2
"""
INTRA, INTER = "bandwidth_gbs = 20", "bandwidth_gbs = 2\n"


@pytest.fixture
def write_file(tmp_path):
    def write(text):
        path = tmp_path / "ours.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("name", "device", "devices_per_node", "nodes"),
    [
        ("h100", "h100", 8, 1),
        ("h100:8", "h100", 8, 1),
        ("h100:3", "h100", 3, 1),
        ("h100:8x16", "h100", 8, 16),
        ("h100:64", "h100", 8, 8),
        ("A100-80:4x2", "a100-80", 4, 2),
        ("gb200", "gb200", 72, 1),
        ("gb300:144", "gb300", 72, 2),
    ],
)
def test_cluster_name_gives_devices_and_nodes(name, device, devices_per_node, nodes):
    cluster = resolve_cluster(name)
    assert (cluster.device.name, cluster.devices_per_node, cluster.nodes) == (device, devices_per_node, nodes)
    assert cluster.name == name
    assert (cluster.intra_node, cluster.inter_node) == (NODE_TYPES[device].intra_node, NODE_TYPES[device].inter_node)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "cluster '' is unknown"),
        ("tpu", "cluster 'tpu' is unknown; expected a GPU (a100-40, a100-80, h100"),
        ("h100:", "cluster 'h100:' is unknown"),
        ("h100:8x", "cluster 'h100:8x' is unknown"),
        ("h100:8x2x2", "cluster 'h100:8x2x2' is unknown"),
        ("h100:-8", "cluster 'h100:-8' is unknown"),
        ("h100:0", "'h100:0' is out of range; expected 1 to 1,048,576 devices"),
        ("h100:8x0", "is out of range"),
        ("h100:8x999999", "is out of range"),
        ("h100:12", "12 devices of cluster 'h100:12' do not fill nodes of 8; expected 8 or 16 devices"),
        ("h100:16x2", "nodes of 16 devices, but a node of h100 has at most 8; expected h100:8x2"),
        ("none.toml", "cluster file none.toml cannot be read: No such file or directory"),
        ("here", "this machine was never measured; try meshwright plan measure first"),
    ],
)
def test_unknown_cluster_name_is_a_one_line_error(name, message, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path / "empty"))
    with pytest.raises(ConfigError) as raised:
        resolve_cluster(name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_cluster_here_is_the_measured_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    assert machine_file() == tmp_path / "machine.toml"
    machine_file().write_text(cluster_toml(preset_cluster("a100-40", 4)))
    assert resolve_cluster("here") == replace(preset_cluster("a100-40", 4), name="here")
    assert resolve_cluster("here:2").device_count == 2
    for name in ("here:8", "here:4x2"):
        with pytest.raises(ConfigError, match="is larger than this machine; expected here, or here:1 to here:4"):
            resolve_cluster(name)
    machine_file().write_text("nodes = 'many'")
    with pytest.raises(ConfigError, match=r"machine.toml: nodes = \"many\" has the wrong type"):
        resolve_cluster("here")


X900 = ("x900", 300_000, 9000, 1500, peak_rates(3000), 160, sustained(0.6, 0.5), "x900", True, PCIE_5_HOST)
LINKS_OF_X900 = (16, NVLINK_5, NETWORK_400G)


def test_adding_a_gpu_is_one_row_of_the_node_table(write_file, monkeypatch):
    """As the recipe of CONTRIBUTING.md says: nothing else has to know the device."""
    row = node_type(*X900, *LINKS_OF_X900)
    monkeypatch.setitem(cluster_module.NODE_TYPES, "x900", row)
    assert (row.device.power, row.device.host_bandwidth) == (1500, PCIE_5_HOST.bandwidth)
    plan = make_plan(build_workload("llama-1b"), resolve_cluster("x900"), tokens=1e9)
    assert plan.cost is not None
    assert plan.cost.megawatt_hours is not None
    assert plan.workload.notes == ()
    assert resolve_cluster("x900:16x2").device == row.device
    assert read_cluster(write_file('like = "x900"')).devices_per_node == 16
    assert read_cluster(write_file("devices_per_node = 1\n[device]\nname = 'x900'")).device == row.device
    assert device_preset("NVIDIA X900 300GB") == "x900"


def test_a_row_of_the_node_table_that_omits_a_figure_is_an_error():
    assert all(field.default is field.empty for field in signature(node_type).parameters.values())
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'inter_node'"):
        node_type(*X900, *LINKS_OF_X900[:-1])


def test_rates_that_nobody_measured_are_named():
    """A rate of another precision, a fraction that no run shows, and one that is another device's."""
    h100, a100, a800, l40s = (NODE_TYPES[name].device for name in ("h100", "a100-80", "a800", "l40s"))
    assert [*h100.assumed_rates("bf16"), *h100.assumed_rates("fp8"), *a100.assumed_rates("fp16")] == []
    assert list(a100.assumed_rates("fp8")) == [
        "assumed rate: 312 TFLOP/s of fp8 on a100-80, that of another precision",
        "assumed rate: fp8 matmuls sustain 80% of the peak of a100-80, which no run shows",
    ]
    assert list(a800.assumed_rates("bf16")) == [
        "assumed rate: bf16 matmuls sustain 80% of the peak of a800, as on a100-80"
    ]
    assert list(l40s.assumed_rates("fp8")) == [
        "assumed rate: fp8 matmuls sustain 50% of the peak of l40s, which no run shows"
    ]
    measured = replace(l40s, measured_matmuls=(MatmulRate("bf16", 4096, 4096, 4096, 200 * TERA),))
    assert list(measured.assumed_rates("bf16")) == []


def test_assumed_rates_of_a_cluster_file_stay_assumed_when_it_is_written(write_file):
    cluster = read_cluster(write_file(CUSTOM))
    assert cluster.device.assumed_peaks == ("fp32", "fp16", "fp64", "fp8", "fp4")
    assert read_cluster(write_file(cluster_toml(cluster))) == cluster
    known = read_cluster(write_file("like = 'a100-80'\n[device.peak_tflops]\nfp8 = 624"))
    assert known.device.assumed_peaks == ("fp4",)


def test_cluster_file_inherits_from_like(write_file):
    text = 'like = "h100"\nnodes = 4\nnode_network_gbs = 100\n[device.peak_tflops]\nbf16 = 800\n'
    cluster = read_cluster(write_file(text))
    h100 = NODE_TYPES["h100"]
    assert (cluster.name, cluster.device_count, cluster.devices_per_node) == ("h100", 32, 8)
    assert cluster.inter_node.bandwidth == 100 * GB / 8
    assert cluster.inter_node.latency == h100.inter_node.latency
    assert cluster.intra_node == h100.intra_node
    assert cluster.device.peak_flops == h100.device.peak_flops | {"bf16": 800 * TERA}
    assert cluster.device.memory == h100.device.memory


def test_cluster_file_can_describe_an_unknown_device(write_file):
    cluster = read_cluster(write_file(CUSTOM))
    assert (cluster.name, cluster.nodes, cluster.devices_per_node) == ("ours", 4, 2)
    assert cluster.device.memory == 10 * GB
    assert cluster.device.peak_flops["fp8"] == cluster.device.peak_flops["bf16"] == 5 * TERA
    assert cluster.device.peak_flops["fp32"] == 2.5 * TERA
    assert cluster.inter_node.bandwidth == 2 * GB


def test_cluster_file_can_name_a_known_device(write_file):
    text = "devices_per_node = 4\n[device]\nname = 'h200'\n[intra_node]\nbandwidth_gbs = 9"
    assert read_cluster(write_file(text)).device == NODE_TYPES["h200"].device
    assert read_cluster(write_file("devices_per_node = 1\n[device]\nname = 'h200'")).device_count == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = 2\nnodes = 3", "is not TOML"),
        ("[[[", "is not TOML"),
        ('like = "tpu"', 'like = "tpu" is unknown; expected one of a100-40'),
        ("nods = 2", "unknown key nods = 2; did you mean nodes?"),
        (
            CUSTOM.replace(INTRA, "bandwidth_gps = 20"),
            "unknown key intra_node.bandwidth_gps = 20; did you mean intra_node.bandwidth_gbs?",
        ),
        (CUSTOM.replace("bf16", "bf61"), "unknown key device.peak_tflops.bf61 = 5"),
        (CUSTOM.replace("devices_per_node = 2", ""), "devices_per_node is missing"),
        (CUSTOM.replace("memory_gb = 10", ""), "device.memory_gb is missing; expected device.name = one of a100-40"),
        (CUSTOM.replace("memory_bandwidth_gbs = 100", ""), "device.memory_bandwidth_gbs is missing"),
        (CUSTOM.replace("peak_tflops = {bf16 = 5}", ""), "device.peak_tflops is missing"),
        (CUSTOM.replace("bf16", "fp8"), "device.peak_tflops has neither bf16 nor fp32"),
        (CUSTOM.replace(INTRA, ""), "intra_node.bandwidth_gbs is missing"),
        (CUSTOM.replace(INTER, "\n"), "inter_node.bandwidth_gbs is missing; expected inter_node.bandwidth_gbs, per"),
        ("node_network_gbs = 3" + CUSTOM, "node_network_gbs and inter_node.bandwidth_gbs both give the bandwidth"),
        (CUSTOM.replace("nodes = 4", "nodes = 0"), "nodes = 0 is out of range"),
        (CUSTOM.replace("nodes = 4", "nodes = 1000000"), "1,000,000 nodes of 2 devices; expected at most 1,048,576"),
        (CUSTOM.replace("nodes = 4", "nodes = 2.5"), "nodes = 2.5 has the wrong type"),
        (CUSTOM.replace("nodes = 4", 'nodes = "4"'), "has the wrong type"),
        (
            CUSTOM.replace("memory_gb = 10", "memory_gb = -1"),
            "device.memory_gb = -1 is out of range",
        ),
        (CUSTOM.replace("memory_gb = 10", "memory_gb = inf"), "is not finite"),
        (CUSTOM.replace(INTRA, INTRA + "\ncurve = 3"), "intra_node.curve = 3 is not a list"),
        (CUSTOM.replace(INTRA, INTRA + "\ncurve = [[1, 2, 3]]"), "intra_node.curve is not a curve"),
        (CUSTOM.replace(INTRA, INTRA + "\ncurve = [[2, 1], [1, 1]]"), "intra_node.curve is not in ascending order"),
        (CUSTOM.replace(INTRA, INTRA + "\ncurve = [[1, 0]]"), "intra_node.curve[0][1] = 0 is out of range"),
        (
            CUSTOM + "[[inter_node.collectives]]\ncollective = 'gossip'",
            'collective = "gossip" is unknown',
        ),
        (CUSTOM + "[[inter_node.collectives]]\ncollective = 'send'", "inter_node.collectives[0].ranks is missing"),
        (CUSTOM + "[[device.matmuls]]\nm = 3", "device.matmuls[0].precision is missing"),
        ("device = 3", "device = 3 is a value"),
        ("#" * (1 << 18) + "\n#", "is larger than 262,144 bytes"),
    ],
)
def test_cluster_file_error_names_file_and_key_in_one_line(write_file, text, message):
    with pytest.raises(ConfigError) as raised:
        read_cluster(write_file(text))
    assert message in str(raised.value)
    assert str(raised.value).startswith("cluster file ")
    assert "ours.toml" in str(raised.value)
    assert "\n" not in str(raised.value)


def measured_cluster():
    """Returns a cluster with everything that a measurement writes."""
    cluster = preset_cluster("h100", 4)
    points = ((65536.0, 1.25 * GB), (1048576.0, 40.5 * GB))
    curves = (BandwidthCurve("all_reduce", 2, points), BandwidthCurve("send", 4, points[:1]))
    device = replace(cluster.device, measured_matmuls=(MatmulRate("bf16", 4096, 1024, 64, 512.25 * TERA),))
    link = replace(cluster.intra_node, bandwidth_curve=points, collective_curves=curves)
    return replace(cluster, device=device, intra_node=link, inter_node=link, launch_seconds=4.75e-6)


@pytest.mark.parametrize(
    "cluster",
    [*map(preset_cluster, NODE_TYPES), preset_cluster("b200", 64), measured_cluster()],
    ids=lambda cluster: cluster.name,
)
def test_written_cluster_file_reads_back_equal(cluster, write_file):
    text = cluster_toml(cluster, ["measured here"])
    assert text.startswith("# measured here\n")
    assert read_cluster(write_file(text)) == cluster


def test_name_with_quotes_and_control_characters_survives_toml(write_file):
    cluster = replace(preset_cluster("h100"), name='a "quoted"\\name\twith\x1f')
    assert read_cluster(write_file(cluster_toml(cluster))) == cluster


@given(st.floats(1e-6, 1e9), st.floats(0, 1e6))
def test_cluster_file_keeps_fifteen_significant_digits(rate, latency):
    cluster = preset_cluster("h100")
    link = replace(cluster.intra_node, bandwidth=rate, latency=latency)
    written = tomllib.loads(cluster_toml(replace(cluster, intra_node=link)))["intra_node"]
    assert written["bandwidth_gbs"] * GB == pytest.approx(rate, rel=1e-14)
    assert written["latency_us"] / 1e6 == pytest.approx(latency, rel=1e-14)


ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_any_value_of_a_cluster_key_is_read_or_rejected(data):
    tree = tomllib.loads(cluster_toml(measured_cluster()))
    table = tree
    while True:
        key = data.draw(st.sampled_from(sorted(table)))
        if not isinstance(table[key], dict) or data.draw(st.booleans()):
            break
        table = table[key]
    table[key] = data.draw(ANY_VALUE)
    try:
        cluster = build_cluster(build_dataclass(ClusterSchema, tree, ""), "any")
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert min(cluster.device_count, cluster.device.memory) > 0
        assert min(cluster.intra_node.bandwidth, cluster.inter_node.bandwidth) > 0


def test_network_of_a_node_equals_bandwidth_per_device(write_file):
    per_device = read_cluster(write_file(CUSTOM))
    text = "node_network_gbs = 4" + CUSTOM.replace("[inter_node]\nbandwidth_gbs = 2", "")
    assert read_cluster(write_file(text)) == per_device


def test_resolve_cluster_does_not_import_torch():
    code = (
        "import sys; from meshwright.base.hardware.resolve_cluster import resolve_cluster\n"
        "resolve_cluster('h100:8x16'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_power_limit_of_a_known_device_lowers_its_rates_and_is_written(write_file):
    text = 'like = "h100"\n[device]\npower_limit_watts = 500\n'
    cluster, full = read_cluster(write_file(text)), NODE_TYPES["h100"].device
    assert cluster.device == full.with_power_limit(500)
    assert cluster.device.sustained_fraction["bf16"] < 0.8 * full.sustained_fraction["bf16"]
    assert read_cluster(write_file(cluster_toml(cluster))) == cluster
    assert "power_limit_watts" not in cluster_toml(preset_cluster("h100"))


@pytest.mark.parametrize("device", ["", "[[device.matmuls]]\nprecision = 'bf16'\nm = 8\nk = 8\nn = 8\ntflops = 1\n"])
def test_a_power_limit_needs_a_device_whose_power_is_known(write_file, device):
    text = CUSTOM.replace("[device]", "[device]\npower_limit_watts = 500")
    text = f'like = "h100"\n[device]\npower_limit_watts = 500\n{device}' if device else text
    with pytest.raises(ConfigError, match="power_limit_watts"):
        read_cluster(write_file(text))
