"""layouts.hardware and layouts.clusters: figures with sources, and every way of writing a cluster."""

import json
import tomllib

import jax
import pytest

from layouts import __main__ as command_line
from layouts.clusters import parse_cluster
from layouts.commands.clusters import describe
from layouts.errors import InputError
from layouts.hardware import DATA, chips, instances

FIGURES = {"flops_per_second", "hbm_bytes", "hbm_bytes_per_second", "fabric", "network", "host"}
ASKED = {"v4", "v5e", "v5p", "v6e", "tpu7x", "a100-40", "a100-80", "h100", "h200", "b200", "gb200", "b300", "gb300", "mi300x"}


def test_every_figure_has_a_source():
    for name, entry in tomllib.loads((DATA / "chips.toml").read_text()).items():
        assert set(entry["sources"]) == FIGURES, name
        assert all(len(source) > 10 for source in entry["sources"].values()), name
    assert all(entry["source"].startswith("https://") for entry in instances().values())


def test_the_chips_asked_for_are_there():
    assert {*chips()} == ASKED | {"cpu"}


@pytest.mark.parametrize(
    ("chip", "number_format", "peak"),
    [
        ("v5p", "bf16", 459e12),
        ("v5p", "fp8", 459e12),  # no faster: the next wider format's
        ("v5p", "fp32", 459e12),  # the default precision rounds operands to bf16
        ("tpu7x", "fp8", 2307e12),  # of one jax device: half a chip
        ("h100", "fp8", 1978.9e12),
        ("h100", "fp4", 1978.9e12),
        ("gb300", "fp4", 15e15),
        ("a100-80", "fp8", 312e12),
    ],
)
def test_peaks(chip, number_format, peak):
    assert chips()[chip].peak(number_format) == peak


def test_an_unknown_format_is_refused():
    with pytest.raises(InputError, match="'bf61' is not known; did you mean bf16"):
        chips()["h100"].peak("bf61")


@pytest.mark.parametrize(
    ("text", "means", "devices", "domain"),
    [
        ("v5p:8x8x8", "v5p:8x8x8", 512, 512),
        ("v5p-1024", "v5p:8x8x8", 512, 512),
        ("v5p-8", "v5p:2x2x1", 4, 4),
        ("v5p-12288", "v5p:16x16x24", 6144, 6144),
        ("v4-32", "v4:2x2x4", 16, 16),
        ("v5litepod-16", "v5e:4x4", 16, 16),
        ("v6e-256", "v6e:16x16", 256, 256),
        ("4*v6e:16x16", "4*v6e:16x16", 1024, 256),
        ("tpu7x-128", "tpu7x:4x4x4", 128, 128),
        ("7x:2x2x1", "tpu7x:2x2x1", 8, 8),
        ("h100:32x8", "h100:32x8", 256, 8),
        ("p5.48xlarge:32", "h100:32x8", 256, 8),
        ("a100:2x4", "a100-80:2x4", 8, 4),
        ("gb200:64x4", "gb200:64x4", 256, 64),  # racks of 72 cannot share 256 evenly
        ("gb200:18x4", "gb200:18x4", 72, 72),
        ("cpu:8", "cpu:8", 8, 8),
    ],
)
def test_ways_of_writing(text, means, devices, domain):
    cluster = parse_cluster(text)
    assert str(cluster) == means
    assert cluster.num_devices == devices
    assert cluster.classes[0].domain_devices == domain


@pytest.mark.parametrize(
    ("text", "rings"),
    [("v5p:4x4x8", (True,) * 3), ("v5p:2x2x4", (False,) * 3), ("v6e:8x16", (False, True)), ("h100:2x8", ())],
)
def test_rings(text, rings):
    assert parse_cluster(text).classes[0].rings == rings


def test_cores_are_told_from_chips():
    assert describe(parse_cluster("v5p-1024"))[0].startswith("v5p-1024: v5p:8x8x8 = 512 chips, 1024 cores, 512 jax devices")


def test_local_is_what_jax_has():
    assert str(parse_cluster("local")) == f"cpu:{jax.device_count()}"


def test_a_machine_type_has_its_own_network():
    assert parse_cluster("p4d.24xlarge:4").classes[0].chip.network.bytes_per_second == 400e9 / 8 / 8


def test_mixed():
    cluster = parse_cluster("h100:4x8+a100-80:2x8")
    assert (cluster.is_mixed, cluster.num_devices) == (True, 48)
    assert cluster.between.bytes_per_second == 25e9  # the slower of the two


def test_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'schema = 1\nexcluded = [3]\n[slow]\n5 = 0.5\n[[classes]]\ncluster = "h100:1x8"\nhbm_bytes = 96e9\n'
        "flops_per_second = { bf16 = 800e12 }\n"
        '[classes.network]\nkind = "roce"\nbytes_per_second = 1e9\nlatency_seconds = 1e-5\n'
    )
    cluster = parse_cluster(str(path))
    chip = cluster.classes[0].chip
    assert (cluster.num_devices, cluster.slow, chip.hbm_bytes, chip.peak("fp8")) == (7, ((5, 0.5),), 96e9, 800e12)
    assert cluster.between.kind == "roce"
    (tmp_path / "same.json").write_text(json.dumps({"schema": 1, "classes": [{"cluster": "v5p-8"}]}))
    assert parse_cluster(str(tmp_path / "same.json")).num_devices == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h1o0:2x2", "chip 'h1o0' is not known; did you mean h100"),
        ("h100", "after 'h100' needs hosts x GPUs, as in h100:2x8"),
        ("h100:8", "after 'h100' needs hosts x GPUs"),
        ("gb200:32x8", "a host has at most 4 of gb200; legal would be gb200:64x4"),
        ("v5p:8x8", "after 'v5p' needs chips along 3 axes, as in v5p:4x4x4"),
        ("v5p:0x2x2", "needs chips along 3 axes"),
        ("v5p-1023", "v5p counts cores, 2 a chip; nearest v5p-1022 or v5p-1024"),
        ("v6e-512", "512 chips of v6e make no slice; nearest 256 chips"),
        ("v5p-130", "65 chips of v5p make no slice; nearest 64 or 128 chips"),
        ("p5.48xlarg", "did you mean p5.48xlarge"),
        ("p5.48xlarge:x", "'x' is no count"),
        ("x*v5p-8", "'x' is no count"),
        ("cpu:many", "a number of devices, as in cpu:8"),
        ("h100:2x8+", "cluster '' is not known"),
        ("nofile.toml", "No such file"),
    ],
)
def test_bad_clusters(text, message):
    with pytest.raises(InputError) as error:
        parse_cluster(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"classes": [{"cluster": "v5p-8"}]}, "schema None; needs schema 1"),
        ({"schema": 2, "classes": [{"cluster": "v5p-8"}]}, "schema 2; needs schema 1"),
        ({"schema": 1, "clases": []}, "keys ['clases']"),
        ({"schema": 1, "classes": [{"chip": "v5p"}]}, "KeyError 'cluster'"),
        ({"schema": 1, "classes": [{"cluster": "v5p-8", "hbm": 1}]}, "figure ['hbm']: legal are hbm_bytes"),
        ({"schema": 1, "classes": [{"cluster": "v5p-8"}], "excluded": [4]}, "device 4 of v5p:2x2x1: legal are 0 to 3"),
        ({"schema": 1, "classes": [{"cluster": "v5p-8"}], "slow": {"0": 2}}, "speed 2.0 of device 0"),
        ([], "holds a list, needs a table"),
    ],
)
def test_bad_files(tmp_path, entry, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(entry))
    with pytest.raises(InputError) as error:
        parse_cluster(str(path))
    assert message in str(error.value)


def test_the_command(tmp_path, capsys):
    out = tmp_path / "chips.json"
    assert command_line.main(["clusters", "v5p-1024", "--sources", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "512 chips" in printed
    assert "v5p.hbm_bytes: https://" in printed
    found = json.loads(out.read_text())
    assert found["schema"] == 1
    assert found["chips"]["v5p"]["hbm_bytes_per_second"] == 2765e9
    assert command_line.main(["clusters"]) == 0
    assert "p5.48xlarge" in capsys.readouterr().out
    assert command_line.main(["clusters", "v5p-1023"]) == 2
