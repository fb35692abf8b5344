"""What holds for all tests."""

import signal

# Started with nohup, every process below would ignore SIGHUP, as it should; these tests send it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
