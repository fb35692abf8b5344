"""The limit of open files is raised for connections, and not for what is started."""

import os
import resource
import subprocess
import sys

SCRIPT = """
import resource, subprocess, sys
from fsdplaunch.sockets import inherited_limit, make_room
def soft(): return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 3000))
make_room(10)
seen = [soft()]
make_room(1000)
seen.append(soft())
with inherited_limit():
    seen.append(soft())
seen.append(soft())
make_room(1 << 20)
seen.append(soft())
print(seen)
"""


def test_limit_is_raised_as_far_as_it_goes_and_children_get_the_old_one():
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 3000
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[300, 1256, 300, 1256, 3000]\n"
