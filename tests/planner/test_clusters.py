"""Clusters: words and files become the machines they name, a file survives being written, and mistakes are one line."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from meshwright.config.reader import build_dataclass
from meshwright.errors import ConfigError
from meshwright.planner.hardware.cluster import DEVICES, GB, NODES, TERA, BandwidthCurve, MatmulRate, preset_cluster
from meshwright.planner.hardware.cluster_file import ClusterSchema, build_cluster, cluster_toml, read_cluster
from meshwright.planner.hardware.resolve_cluster import machine_file, resolve_cluster

CUSTOM = """
nodes = 4
devices = 2
[device]
memory_gb = 10
stream_gbs = 100
peak_tflops = {bf16 = 5}
[inside]
gbs = 20
[between]
gbs = 2
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "ours.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("word", "device", "per_node", "nodes"),
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
def test_a_word_names_devices_and_nodes(word, device, per_node, nodes):
    found = resolve_cluster(word)
    assert (found.device.name, found.devices_per_node, found.nodes, found.name) == (device, per_node, nodes, word)
    assert (found.intra_node, found.inter_node) == NODES[device][1:]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("", "no cluster ''"),
        ("tpu", "no cluster 'tpu'; allowed: a100-40, a100-80, h100"),
        ("h100:", "no cluster 'h100:'"),
        ("h100:8x", "no cluster 'h100:8x'"),
        ("h100:8x2x2", "no cluster 'h100:8x2x2'"),
        ("h100:-8", "no cluster 'h100:-8'"),
        ("h100:0", "'h100:0' is out of range; allowed: 1 to 1,048,576 devices"),
        ("h100:8x0", "is out of range"),
        ("h100:8x999999", "is out of range"),
        ("h100:12", "12 devices of cluster 'h100:12' are no whole nodes of 8; allowed: 8, 16"),
        ("h100:16x2", "nodes of 16, and those of h100 have at most 8; allowed: h100:8x2"),
        ("none.toml", "cluster file none.toml cannot be read: No such file or directory"),
        ("here", "this machine was never measured; run meshwright plan measure first"),
    ],
)
def test_a_word_that_names_nothing_is_refused_in_one_line(word, said, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path / "empty"))
    with pytest.raises(ConfigError) as refused:
        resolve_cluster(word)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_here_is_this_machine_as_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    assert machine_file() == tmp_path / "machine.toml"
    machine_file().write_text(cluster_toml(preset_cluster("a100-40", 4)))
    assert resolve_cluster("here") == replace(preset_cluster("a100-40", 4), name="here")
    assert resolve_cluster("here:2").device_count == 2
    for word in ("here:8", "here:4x2"):
        with pytest.raises(ConfigError, match="is not this machine; allowed: here, or here:1 to here:4"):
            resolve_cluster(word)
    machine_file().write_text("nodes = 'many'")
    with pytest.raises(ConfigError, match=r"machine.toml: nodes = \"many\" has the wrong type"):
        resolve_cluster("here")


def test_what_a_file_leaves_out_is_that_of_what_it_is_like(written):
    found = read_cluster(written('like = "h100"\nnodes = 4\nadapters_gbs = 100\n[device.peak_tflops]\nbf16 = 800\n'))
    assert (found.name, found.device_count, found.devices_per_node) == ("h100", 32, 8)
    assert found.inter_node.bandwidth == 100 * GB / 8
    assert found.inter_node.latency == NODES["h100"][2].latency
    assert found.intra_node == NODES["h100"][1]
    assert found.device.peak_flops == DEVICES["h100"].peak_flops | {"bf16": 800 * TERA}
    assert found.device.memory == DEVICES["h100"].memory


def test_a_file_of_its_own_needs_no_likeness(written):
    found = read_cluster(written(CUSTOM))
    assert (found.name, found.nodes, found.devices_per_node, found.device.memory) == ("ours", 4, 2, 10 * GB)
    assert found.device.peak_flops["fp8"] == found.device.peak_flops["bf16"] == 5 * TERA
    assert found.device.peak_flops["fp32"] == 2.5 * TERA
    assert found.inter_node.bandwidth == 2 * GB
    assert read_cluster(written("devices = 4\n[device]\nname = 'h200'\n[inside]\ngbs = 9")).device == DEVICES["h200"]
    assert read_cluster(written("devices = 1\n[device]\nname = 'h200'")).device_count == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = 2\nnodes = 3", "is not TOML"),
        ("[[[", "is not TOML"),
        ('like = "tpu"', 'like = "tpu" is not known; allowed: a100-40'),
        ("nods = 2", "unknown key nods = 2; did you mean nodes?"),
        (CUSTOM.replace("gbs = 20", "gps = 20"), "unknown key inside.gps = 20; did you mean gbs?"),
        (CUSTOM.replace("bf16", "bf61"), "unknown key device.peak_tflops.bf61 = 5"),
        (CUSTOM.replace("devices = 2", ""), "devices is missing"),
        (CUSTOM.replace("memory_gb = 10", ""), "device.memory_gb is missing; allowed: device.name = one of a100-40"),
        (CUSTOM.replace("stream_gbs = 100", ""), "device.stream_gbs is missing"),
        (CUSTOM.replace("peak_tflops = {bf16 = 5}", ""), "device.peak_tflops is missing"),
        (CUSTOM.replace("bf16", "fp8"), "device.peak_tflops has neither bf16 nor fp32"),
        (CUSTOM.replace("gbs = 20", ""), "inside.gbs is missing"),
        (CUSTOM.replace("gbs = 2\n", "\n"), "between.gbs is missing; allowed: between.gbs, one direction"),
        ("adapters_gbs = 3" + CUSTOM, "adapters_gbs and between.gbs say the same"),
        (CUSTOM.replace("nodes = 4", "nodes = 0"), "nodes = 0 is out of range"),
        (CUSTOM.replace("nodes = 4", "nodes = 2.5"), "nodes = 2.5 has the wrong type"),
        (CUSTOM.replace("nodes = 4", 'nodes = "4"'), "has the wrong type; allowed: a whole number"),
        (
            CUSTOM.replace("memory_gb = 10", "memory_gb = -1"),
            "device.memory_gb = -1 is out of range; allowed: from 1e-09",
        ),
        (CUSTOM.replace("memory_gb = 10", "memory_gb = inf"), "is not finite"),
        (CUSTOM.replace("gbs = 20", "gbs = 20\ncurve = 3"), "inside.curve = 3 is not a list"),
        (CUSTOM.replace("gbs = 20", "gbs = 20\ncurve = [[1, 2, 3]]"), "inside.curve is no curve"),
        (CUSTOM.replace("gbs = 20", "gbs = 20\ncurve = [[2, 1], [1, 1]]"), "inside.curve is not in order"),
        (CUSTOM.replace("gbs = 20", "gbs = 20\ncurve = [[1, 0]]"), "inside.curve[0][1] = 0 is out of range"),
        (
            CUSTOM + "[[between.curves]]\ncollective = 'gossip'",
            'collective = "gossip" is not known; allowed: all_reduce',
        ),
        (CUSTOM + "[[between.curves]]\ncollective = 'send'", "between.curves[0].ranks is missing"),
        (CUSTOM + "[[device.products]]\nrows = 3", "device.products[0].precision is missing"),
        ("device = 3", "device = 3 is a value"),
        ("#" * (1 << 20) + "\n#", "is over 1,048,576 bytes"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_field_and_file(written, text, said):
    with pytest.raises(ConfigError) as refused:
        read_cluster(written(text))
    assert said in str(refused.value)
    assert str(refused.value).startswith("cluster file ")
    assert "ours.toml" in str(refused.value)
    assert "\n" not in str(refused.value)


def measured():
    """With everything that a measurement writes."""
    whole = preset_cluster("h100", 4)
    points = ((65536.0, 1.25 * GB), (1048576.0, 40.5 * GB))
    curves = (BandwidthCurve("all_reduce", 2, points), BandwidthCurve("send", 4, points[:1]))
    device = replace(whole.device, measured_matmuls=(MatmulRate("bf16", 4096, 1024, 64, 512.25 * TERA),))
    inside = replace(whole.intra_node, bandwidth_curve=points, collective_curves=curves)
    return replace(whole, device=device, intra_node=inside, inter_node=inside, measured={"launch": 4.75e-6})


@pytest.mark.parametrize(
    "cluster", [*map(preset_cluster, NODES), preset_cluster("b200", 64), measured()], ids=lambda c: c.name
)
def test_a_cluster_survives_being_written(cluster, written):
    text = cluster_toml(cluster, ["measured here"])
    assert read_cluster(written(text)) == cluster


@given(some.floats(1e-6, 1e9), some.floats(0, 1e6))
def test_figures_are_written_with_fifteen_digits(rate, latency):
    whole = preset_cluster("h100")
    text = cluster_toml(replace(whole, intra_node=replace(whole.intra_node, bandwidth=rate, latency=latency)))
    said = dict(line.split(" = ") for line in text.partition("[inside]")[2].partition("[")[0].split("\n") if line)
    assert float(said["gbs"]) * GB == pytest.approx(rate, rel=1e-14)
    assert float(said["latency_us"]) / 1e6 == pytest.approx(latency, rel=1e-14)


ANYTHING = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(some.data())
def test_whatever_stands_in_a_field_is_read_or_refused(data):
    tree = tomllib.loads(cluster_toml(measured()))
    below = tree
    while True:
        key = data.draw(some.sampled_from(sorted(below)))
        if not isinstance(below[key], dict) or data.draw(some.booleans()):
            break
        below = below[key]
    below[key] = data.draw(ANYTHING)
    try:
        found = build_cluster(build_dataclass(ClusterSchema, tree, ""), "any")
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert min(found.device_count, found.device.memory, found.intra_node.bandwidth, found.inter_node.bandwidth) > 0


def test_a_share_of_adapters_and_a_rate_a_device_are_the_same_cluster(written):
    own = read_cluster(written(CUSTOM))
    shared = read_cluster(written("adapters_gbs = 4" + CUSTOM.replace("[between]\ngbs = 2", "")))
    assert own == shared


def test_reading_a_cluster_imports_no_torch():
    code = "import sys; from meshwright.planner.hardware.resolve_cluster import cluster_of; cluster_of('h100:8x16')"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
