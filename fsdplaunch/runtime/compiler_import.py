"""Importing this module imports torch's compiler, which a worker's first optimizer would import in each worker.

Imported in the fork server, before workers are forked.
"""

from fsdplaunch.runtime.torch_internals import import_compiler

import_compiler()
