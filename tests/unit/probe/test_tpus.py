"""TPU chips as the kernel lists them, and a pod's hosts as its variables name them."""

import pytest

from fsdplaunch.errors import MachineError
from fsdplaunch.probe.hardware import count_tpu_chips, pod_settings


def test_chips_are_googles_devices_with_a_tpus_number(tmp_path):
    for place, (vendor, device) in enumerate(
        [("0x1ae0", "0x0063"), ("0x1ae0", "0x006f"), ("0x1ae0", "0x9999"), ("0x10de", "0x0063")]
    ):
        folder = tmp_path / f"0000:00:0{place}.0"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "vendor").write_text("0x1ae0")
    assert count_tpu_chips(tmp_path) == 2
    assert count_tpu_chips(tmp_path / "nowhere") == 0


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, ()),
        ({"TPU_WORKER_HOSTNAMES": "h0", "TPU_WORKER_ID": "0"}, ()),
        ({"TPU_WORKER_HOSTNAMES": "h0", "TPU_WORKER_ID": "x"}, ()),
        ({"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"}, ()),
        ({"TPU_PROCESS_ADDRESSES": "localhost:8476,localhost:8477", "CLOUD_TPU_TASK_ID": "1"}, ()),
        (
            {"TPU_PROCESS_ADDRESSES": "10.0.0.1:8476,10.0.0.2:8476", "CLOUD_TPU_TASK_ID": "1"},
            ("num_machines=2", "machine_rank=1", "main_process_ip=10.0.0.1"),
        ),
        (
            {"TPU_WORKER_HOSTNAMES": "h0, h1,h2", "TPU_WORKER_ID": "2"},
            ("num_machines=3", "machine_rank=2", "main_process_ip=h0"),
        ),
    ],
)
def test_a_pods_variables_say_where_this_host_belongs(environ, settings):
    assert pod_settings(environ) == settings


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "TPU_WORKER_ID is not set"),
        ({"TPU_WORKER_ID": "x"}, "TPU_WORKER_ID is 'x'"),
        ({"TPU_WORKER_ID": "-1"}, "TPU_WORKER_ID is '-1'"),
        ({"TPU_WORKER_ID": "2"}, "TPU_WORKER_ID is '2'"),
        ({"TPU_WORKER_ID": "0", "CLOUD_TPU_TASK_ID": "7"}, "CLOUD_TPU_TASK_ID is '7'"),
    ],
)
def test_a_pods_host_without_a_number_is_refused(environ, said):
    with pytest.raises(MachineError) as caught:
        pod_settings({"TPU_WORKER_HOSTNAMES": "h0,h1"} | environ)
    assert caught.value.message == f"this TPU pod has 2 hosts, h0 first, and {said}: which of them is this?"
    assert "from 0 to 1" in caught.value.hint
