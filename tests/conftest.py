"""What every test process needs."""

import signal

# A shell that runs the tests in the background lets them ignore SIGINT, and every child would inherit that:
# with a handler here, programs that tests start and interrupt get the default again.
signal.signal(signal.SIGINT, signal.default_int_handler)
