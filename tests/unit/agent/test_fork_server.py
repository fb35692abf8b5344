"""The fork server beside an agent that goes."""

import subprocess
import sys

_TELLS = """
from fsdplaunch.agent.fork_server import ForkServerProcess
from fsdplaunch.channel import open_channel
here, there = open_channel()
here.close()
ForkServerProcess(there)._tell({"started": 1})
print("went on")
"""


def test_it_ends_without_a_word_where_the_agent_has_gone_since_it_asked():
    done = subprocess.run([sys.executable, "-c", _TELLS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


_SIGNALS = """
import os, signal, time
from fsdplaunch.agent import fork_server as server
from fsdplaunch.agent.fork_client import ForkServer

leave = server.leave_private_dir
def leave_late(environ):
    time.sleep(0.3)
    leave(environ)
server.leave_private_dir = leave_late

handle = ForkServer()
if handle.start((), ()) is not None:
    time.sleep(60)  # a worker
    os._exit(0)
handle.wait_until_ready()
pid = handle.start_worker(["train.py"], {}, cold=False, files=[0, 1, 2], cpus=())
os.kill(pid, signal.SIGTERM)
print([ended.code for ended in handle.ended(20)])
handle.close()
"""


def test_a_signal_reaches_a_worker_in_its_first_moment():
    done = subprocess.run([sys.executable, "-c", _SIGNALS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[-15]\n", "")


_ASKS = """
import os, sys
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
from fsdplaunch.agent import fork_server
open("asks.py", "w").write("import os\\nSEEN = os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')\\n")
sys.path.insert(0, "")
loaded = fork_server.import_all(["asks"], before=dict(os.environ))
print(sys.modules["asks"].SEEN, "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ, dict(loaded.changes))
fork_server._GPU_DEVICES = ("/dev/null",)
before, file = fork_server.uses_gpu(), open("/dev/null")
print(before, fork_server.uses_gpu())
"""


def test_a_preloaded_module_that_asks_for_gpus_opens_none_and_an_open_device_is_noticed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _ASKS], capture_output=True, text=True, cwd=tmp_path, stdin=subprocess.PIPE
    )
    assert done.stdout == "1 False {}\nFalse True\n", done.stderr


_FINALIZERS = """
import weakref
from fsdplaunch.agent import forked_process

class Thing:
    pass

def end(name):
    print(name)

def end_of_torchs(name):
    print(name)

end_of_torchs.__module__ = "torch.library"
things = [Thing() for _ in range(3)]
weakref.finalize(things[0], end, "a preloaded module's")
weakref.finalize(things[1], end_of_torchs, "torch's, from before the fork")
forked_process.share_modules()
weakref.finalize(things[2], end_of_torchs, "torch's, from after it")
"""


def test_of_what_was_there_before_the_fork_only_torchs_finalizers_are_left_out_at_the_end():
    done = subprocess.run([sys.executable, "-c", _FINALIZERS], capture_output=True, text=True, check=True)
    assert done.stdout == "torch's, from after it\na preloaded module's\n", done.stderr
